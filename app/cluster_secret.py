"""The secret that the engines of this service share, where the operator has not set one."""

import secrets

from pydantic import SecretStr

from actors.upstream import ray_private
from configs.settings import ServiceSettings

KEY = b"peer-secret"


def fallback_secret(settings: ServiceSettings) -> SecretStr:
    """What engines share that find no secret of the operator's in their own environment: the one that the build finds
    in its own, or else the Ray cluster's."""
    return settings.transfer.operators_secret() or SecretStr(cluster_secret())


def cluster_secret() -> str:
    """Made once in the life of a Ray cluster and kept in its control store.

    Serve builds the application again whenever its `args` change, and old replicas serve beside new ones for a
    while: with a secret made at each build, the two would not talk.
    """
    fresh = secrets.token_hex(32)
    if not ray_private.store_connected():
        return fresh  # `serve build` only wants to know the deployments' names
    # Two builds at once agree: the first one's is kept.
    ray_private.store_put(KEY, fresh, overwrite=False)
    kept = ray_private.store_get(KEY)
    assert kept is not None, "the key was just put"
    return kept.decode()
