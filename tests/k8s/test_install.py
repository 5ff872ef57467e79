"""`k8s/install.sh` chooses PyTorch's build: the script, pip and small package indexes on disk."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from testing.ports import free_port
from tests.k8s.check import ROOT

BACKEND = """
import os
from pathlib import Path
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "tandem-1-py3-none-any.whl"
    Path(folder, name).write_bytes(Path("../tandem", name).read_bytes())
    return name
"""
CPU = {"nixl": "1.5.1", "pytest": "9.2.0", "torch": "2.13.0+cpu"}
EXTRA = (ROOT / "torch-from-pypi.txt").read_text().split()


def publish(index: Path, name: str, version: str) -> None:
    """Add a wheel without modules to a package index on disk."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        record = f"{stem}.dist-info/RECORD,,\n"
        for file, text in files.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)
            sha = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{stem}.dist-info/{file},sha256={sha},{len(text)}\n"
        wheel.writestr(f"{stem}.dist-info/RECORD", record)
    links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a small project with this project's script, names and locks of few packages."""
    checkout = tmp_path / "checkout"
    (checkout / "k8s").mkdir(parents=True)
    for name in ("install.sh", "development-only.txt", "torch-from-pypi.txt"):
        shutil.copy(ROOT / name, checkout / "k8s")
    (checkout / "requirements-cpu.lock").write_text("".join(f"{name}=={version}\n" for name, version in CPU.items()))
    (checkout / "requirements-gpu.lock").write_text("".join(f"{name}==13.0\n" for name in (*EXTRA, "triton")))
    (checkout / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (checkout / "backend.py").write_text(BACKEND)
    publish(tmp_path, "tandem", "1")
    return checkout


def environment(folder: Path) -> Path:
    """Return a virtual environment with this environment's pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for part in Path(sysconfig.get_path("purelib")).glob("pip*"):
        (packages / part.name).symlink_to(part)
    return folder


def installed(environment: Path) -> dict[str, str]:
    (packages,) = environment.glob("lib/python3*/site-packages")
    found = (path.name.removesuffix(".dist-info").split("-") for path in packages.glob("*.dist-info"))
    return {name.replace("_", "-"): version for name, version in found if name != "pip"}


def install(checkout: Path, index: Path, torch_index: str, venv: Path) -> subprocess.CompletedProcess[str]:
    """Run the script for the image with these package indexes only."""
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.as_uri(), "PIP_NO_CACHE_DIR": "1"}
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return subprocess.run(
        [str(checkout / "k8s/install.sh"), str(venv), "cpu"],
        env=ours | pip | {"TORCH_CPU_INDEX": torch_index},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("way", ["configured index", "PyTorch's index", "CUDA build", "none"])
def test_where_torch_comes_from(tmp_path: Path, checkout: Path, way: str) -> None:
    """The CPU wheel from either index, else the CUDA build and its libraries, else an error.

    The image has no test tools, nor triton in any case. With neither build, nothing is installed.
    """
    index, second = tmp_path / "index", tmp_path / "second"
    for name, version in {"nixl": "1.5.1", "torch": "2.12.0", **dict.fromkeys((*EXTRA, "triton"), "13.0")}.items():
        publish(index, name, version)
    publish(second, "nixl", "9")  # the second index is for torch only
    torch_index = f"http://127.0.0.1:{free_port()}" if way == "CUDA build" else second.as_uri()
    expected = {"nixl": "1.5.1", "tandem": "1", "torch": "2.13.0+cpu"}
    if way == "configured index":
        publish(index, "torch", "2.13.0+cpu")
    elif way == "PyTorch's index":
        publish(second, "torch", "2.13.0+cpu")
    elif way == "CUDA build":
        publish(index, "torch", "2.13.0")
        expected |= {"torch": "2.13.0", **dict.fromkeys(EXTRA, "13.0")}
    else:
        expected = {}
    venv = environment(tmp_path / "venv")
    ended = install(checkout, index, torch_index, venv)
    assert installed(venv) == expected, ended.stdout + ended.stderr
    said = {
        "configured index": "torch 2.13.0+cpu (0.2 GB) comes from the configured package index\n",
        "PyTorch's index": f"torch 2.13.0+cpu (0.2 GB) comes from {second.as_uri()}; the configured",
        "CUDA build": "torch 2.13.0 with CUDA (2.4 GB; 3 GB more on disk than the CPU wheel) comes from the configured",
        "none": "no package index has torch 2.13.0 for Python 3.",
    }
    assert said[way] in ended.stdout + ended.stderr
    assert ("does not answer" in ended.stdout) == (way == "CUDA build")
    assert (ended.returncode == 0) == (way != "none")


def test_another_python_is_refused_before_anything_is_fetched(tmp_path: Path, checkout: Path) -> None:
    """The message names the interpreter, and those that will do."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho Python 3.14\n")
    python.chmod(0o755)
    ended = install(checkout, tmp_path, "", tmp_path / "venv")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "has Python 3.14; remove it, then choose 3.11, 3.12 or 3.13" in ended.stderr
