"""Secret shared by the engines of a service if the operator has not set one."""

import secrets

from pydantic import SecretStr

from actors.upstream import ray_private
from configs.settings.service import ServiceSettings

KEY = b"peer-secret"


def fallback_secret(settings: ServiceSettings) -> SecretStr:
    """Return the secret for engines without one in their own environment.

    Uses the operator's secret in the settings or the environment of the build, else the Ray
    cluster's.
    """
    return settings.transfer.operators_secret() or SecretStr(cluster_secret())


def cluster_secret() -> str:
    """Return the Ray cluster's secret from its control store; generate it at the first call.

    Serve builds the application again after a change of `args`. Old and new replicas run at the
    same time and could not authenticate each other with a new secret per build.
    """
    fresh = secrets.token_hex(32)
    if not ray_private.store_connected():
        return fresh  # `serve build` needs only the names of the deployments
    # Of two concurrent builds, both use the secret that is stored first.
    ray_private.store_put(KEY, fresh, overwrite=False)
    kept = ray_private.store_get(KEY)
    assert kept is not None, "the key was just put"
    return kept.decode()
