"""Objects that KubeRay 1.7.0 made from the overlay cpu on a cluster, shortened (2026-11-27)."""

from pathlib import Path
from typing import Any

import yaml


def load(name: str) -> dict[str, Any]:
    """Return `head-pod`, `router-pod` or `decode-pod`."""
    found: dict[str, Any] = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def labels(role: str) -> dict[str, str]:
    """Return the labels of a role's pods; prefill's and decode's differ in the role alone."""
    if role == "prefill":
        return {key: value.replace("decode", role) for key, value in labels("decode").items()}
    found: dict[str, str] = load(f"{role}-pod")["metadata"]["labels"]
    return found
