"""The secret shared by the engines of this service when the operator has not set one."""

import secrets

from pydantic import SecretStr

from actors.upstream import ray_private
from configs.settings import ServiceSettings

KEY = b"peer-secret"


def fallback_secret(settings: ServiceSettings) -> SecretStr:
    """Return the secret for engines without one in their own environment.

    It is the secret in the environment of the build, or else the Ray cluster's.
    """
    return settings.transfer.operators_secret() or SecretStr(cluster_secret())


def cluster_secret() -> str:
    """Return a secret made once in the life of a Ray cluster and kept in its control store.

    Serve builds the application again when its `args` change, and old replicas serve beside new
    ones for a while: with a secret per build they could not authenticate each other.
    """
    fresh = secrets.token_hex(32)
    if not ray_private.store_connected():
        return fresh  # `serve build` only needs the deployments' names
    # The first of two concurrent builds wins.
    ray_private.store_put(KEY, fresh, overwrite=False)
    kept = ray_private.store_get(KEY)
    assert kept is not None, "the key was just put"
    return kept.decode()
