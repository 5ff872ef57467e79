"""Secret with which engines of a Ray cluster authenticate each other if the operator sets none."""

import secrets

from pydantic import SecretStr

from actors.upstream import ray_private
from configs.settings.service import ServiceSettings

KEY = b"peer-secret"


def fallback_secret(settings: ServiceSettings) -> SecretStr:
    """Return the operator's secret, else the Ray cluster's; engines prefer their own environment's.

    Raises SettingsError if the secret in the environment is too short.
    """
    return settings.transfer.operators_secret() or SecretStr(cluster_secret())


def cluster_secret() -> str:
    """Return the secret in the Ray cluster's control store; generate and store it if necessary.

    Serve builds the application again after a change of `args`. Old and new replicas run at the
    same time and could not authenticate each other with a new secret per build. In a process
    without a Ray cluster, return a new secret.
    """
    fresh = secrets.token_hex(32)
    if not ray_private.store_connected():
        return fresh  # `serve build` starts no engines, which would need the same secret
    # Of two concurrent builds, both use the secret that is stored first.
    ray_private.store_put(KEY, fresh, overwrite=False)
    kept = ray_private.store_get(KEY)
    assert kept is not None, f"Ray's control store has no key {KEY!r}, although it was just stored"
    return kept.decode()
