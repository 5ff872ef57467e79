"""`k8s/install.sh` chooses PyTorch's build: the script, pip and small package indexes on disk."""

from __future__ import annotations

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

PROJECT = '[project]\nname = "tandem"\nversion = "1"\n[tool.setuptools]\npackages = []\n'
EXTRA = dict.fromkeys((ROOT / "torch-from-pypi.txt").read_text().split(), "13.0")
TOOLS = ("pip", "setuptools")
CPU, CUDA = {"torch": "2.13.0+cpu"}, {"torch": "2.13.0"}


def publish(index: Path, packages: dict[str, str]) -> None:
    for name, version in packages.items():
        (index / name).mkdir(parents=True, exist_ok=True)
        file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        info = file.removesuffix("-py3-none-any.whl") + ".dist-info"
        with zipfile.ZipFile(index / name / file, "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "".join(f"{info}/{part},,\n" for part in ("METADATA", "WHEEL", "RECORD")))
        with (index / name / "index.html").open("a") as page:
            page.write(f'<!DOCTYPE html><a href="{file}">{file}</a>\n')


def environment(folder: Path) -> Path:
    """Create a virtual environment with this one's pip; return its packages' folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (packages,) = (folder / "venv").glob("lib/python3*/site-packages")
    for part in Path(sysconfig.get_path("purelib")).iterdir():
        if part.name.startswith((*TOOLS, "_distutils_hack")):
            (packages / part.name).symlink_to(part)
    return packages


def installed(packages: Path) -> dict[str, str]:
    found = dict(path.stem.replace("_", "-").rsplit("-", 1) for path in packages.glob("*.dist-info"))
    return {name: version for name, version in found.items() if name not in TOOLS}


def install(folder: Path, torch_index: str, kind: str = "cpu") -> subprocess.CompletedProcess[str]:
    """Run the script as the image does, with `folder/index` as the package index, in a checkout
    with small locks.
    """
    checkout = folder / "checkout"
    (checkout / "k8s").mkdir(parents=True)
    for name in ("install.sh", "development-only.txt", "torch-from-pypi.txt"):
        shutil.copy(ROOT / name, checkout / "k8s")
    (checkout / "requirements-cpu.lock").write_text("nixl==1.5.1\npytest==9.2.0\ntorch==2.13.0+cpu\n")
    (checkout / "requirements-gpu.lock").write_text(
        "".join(f"{name}==13.0\n" for name in (*EXTRA, "triton")) + "torch==2.13.0\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    ours = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": (folder / "index").as_uri(), "TORCH_CPU_INDEX": torch_index}
    command = [str(checkout / "k8s/install.sh"), str(folder / "venv")]
    ended = subprocess.run([*command, kind], env=kept | ours, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        (checkout / "pyproject.toml").write_text(PROJECT)
        subprocess.run([*command, "checkout"], env=kept | ours, capture_output=True, text=True, check=True)
    return ended


@pytest.mark.parametrize(
    ("kind", "configured", "pytorch", "expected", "message"),
    [
        ("cpu", [CPU], {}, CPU, "torch 2.13.0+cpu (0.2 GB) comes from the configured package index\n"),
        ("cpu", [CUDA], CPU, CPU, "torch 2.13.0+cpu (0.2 GB) comes from file:///"),
        ("cpu", [CUDA], None, CUDA | EXTRA, "torch 2.13.0 with CUDA (2.4 GB; 3 GB more on disk than the CPU wheel)"),
        ("cpu", [{"torch": "2.12.0"}], {}, None, "no package index has torch 2.13.0 for Python 3."),
        # To pip, 2.13.0+cpu is the newest 2.13.0 where the index has both.
        ("gpu", [CPU, CUDA], {}, CUDA | EXTRA, ""),
    ],
)
def test_where_torch_comes_from(
    tmp_path: Path, kind: str, configured: list[dict], pytorch: dict | None, expected: dict | None, message: str
) -> None:
    """The CPU wheel from either index, else the CUDA build and its libraries, else an error; with
    GPUs the CUDA build.

    Only torch comes from PyTorch's index, which may not answer (None). After an error, nothing is
    installed. The image has neither test tools nor triton.
    """
    for packages in ({"nixl": "1.5.1", "triton": "13.0", **EXTRA}, *configured):
        publish(tmp_path / "index", packages)
    publish(tmp_path / "pytorch", {"nixl": "9", **(pytorch or {})})
    found = environment(tmp_path)
    torch_index = f"http://127.0.0.1:{free_port()}" if pytorch is None else (tmp_path / "pytorch").as_uri()
    ended = install(tmp_path, torch_index, kind)
    more = {"nixl": "1.5.1"} if kind == "cpu" else {"triton": "13.0"}
    assert installed(found) == ({} if expected is None else {"tandem": "1", **more, **expected}), ended.stderr
    assert message in ended.stdout + ended.stderr
    assert ("PyTorch's package index does not answer: http://127.0.0.1" in ended.stdout) == (pytorch is None)
    assert (ended.returncode == 0) == (expected is not None)


def test_another_python_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    """The message names the interpreter, and those that will do."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho Python 3.14\n")
    python.chmod(0o755)
    ended = install(tmp_path, "")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "has Python 3.14; remove it, then choose 3.11, 3.12 or 3.13" in ended.stderr
