"""Install Tandem's wheel, and start the fork server for the engines of these tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from testing import fork_server
from testing.programs import ROOT

fork_server.prepare()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with the wheel, and the libraries of this environment."""
    folder = tmp_path_factory.mktemp("package")
    for part in ("actors", "app", "configs", "connectors"):
        shutil.copytree(ROOT / part, folder / "source" / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, folder / "source")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    venv = folder / "venv"
    pip = [sys.executable, "-m", "pip"]
    # pip's cache finds a wheel by the path of its archive, and pytest uses a path again.
    make_wheel = [*pip, "wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    for command in (
        [sys.executable, "-c", build],
        [*make_wheel, str(folder / "tandem-0.1.0.tar.gz")],
        [sys.executable, "-m", "venv", "--without-pip", str(venv)],
        [*pip, "--python", str(venv), "install", "--no-deps", str(folder / "tandem-0.1.0-py3-none-any.whl")],
    ):
        subprocess.run(command, cwd=folder / "source", check=True, stdout=subprocess.DEVNULL)
    (packages,) = venv.glob("lib/python3*/site-packages")
    # Python does not read the .pth files below this path, so the checkout stays out.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return venv
