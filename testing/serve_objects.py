"""Private objects of Ray Serve that tests inspect."""

from __future__ import annotations

from typing import Any

from ray.serve import Application, Deployment


def deployment_of(application: Application) -> Deployment:
    return application._bound_deployment  # noqa: SLF001 - Ray Serve has no public name for it


def deployment_config_of(deployment: Deployment) -> Any:
    return deployment._deployment_config  # noqa: SLF001 - Ray Serve has no public name for it


def replica_config_of(deployment: Deployment) -> Any:
    return deployment._replica_config  # noqa: SLF001 - Ray Serve has no public name for it
