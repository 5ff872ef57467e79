"""Ray Serve's own objects, as far as tests look into them."""

from __future__ import annotations

from typing import Any

from ray.serve import Application, Deployment


def deployment_of(application: Application) -> Deployment:
    """Return the deployment that an application binds."""
    return application._bound_deployment  # noqa: SLF001 - Ray Serve has no public name for it


def deployment_config_of(deployment: Deployment) -> Any:
    """Return what Ray Serve keeps of a deployment's own options."""
    return deployment._deployment_config  # noqa: SLF001 - Ray Serve has no public name for it


def replica_config_of(deployment: Deployment) -> Any:
    """Return what Ray Serve keeps of a deployment's options for its replicas."""
    return deployment._replica_config  # noqa: SLF001 - Ray Serve has no public name for it
