"""Resolve requirements-gpu.lock with uv.

    python -m tests.campaigns.gpu_lock build/lock/bin/uv

It reads the wheels' metadata only. It keeps the releases of the current lock, and uses those of
requirements-cpu.lock for new packages where the requirements allow them. So a second run changes
nothing, and GPU engines run with the packages that the suite tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
CPU_LOCK, GPU_LOCK = PROJECT / "requirements-cpu.lock", PROJECT / "requirements-gpu.lock"
CONSTRAINTS = "cuda-python>=13\n"
"""cuda-python 12 installs CUDA 12's modules over those of cuda-bindings 13, which the CUDA 13
build of torch needs.
"""
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_31", "--only-binary", ":all:")
FORMAT = ("--no-header", "--no-annotate", "--no-config", "--quiet")


def name(requirement: str) -> str:
    """The normalized name in a requirement or a distribution's metadata."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def pins(text: str) -> dict[str, str]:
    """Version of each package in a lock, by normalized name."""
    lines = (line.partition("==") for line in text.splitlines())
    return {name(package): version for package, _, version in lines}


def preferred(cpu: str, gpu: str) -> dict[str, str]:
    """Versions to keep if possible: those of the present GPU lock first, then those of the CPU
    lock.
    """
    public = {package: version for package, version in pins(cpu).items() if "+" not in version}
    return public | pins(gpu)


def changes(lock: Mapping[str, str], resolved: Mapping[str, str]) -> list[str]:
    """One line for each package in which a resolution differs from the lock."""
    packages = sorted(lock.keys() | resolved.keys())
    differing = [one for one in packages if lock.get(one) != resolved.get(one)]
    return [
        f"{one}: locked {lock.get(one, 'not at all')}, resolved {resolved.get(one, 'not at all')}" for one in differing
    ]


def resolve(uv: str) -> None:
    """Write requirements-gpu.lock."""
    present = GPU_LOCK.read_text() if GPU_LOCK.exists() else ""
    with tempfile.TemporaryDirectory() as folder:
        out, constraints = Path(folder) / "lock", Path(folder) / "constraints"
        constraints.write_text(CONSTRAINTS)
        # uv prefers the versions that it finds in its output file.
        wanted = preferred(CPU_LOCK.read_text(), present)
        out.write_text("".join(f"{package}=={version}\n" for package, version in wanted.items()))
        extras = ("--extra", "gpu", "--extra", "serve")
        command = [uv, "pip", "compile", "pyproject.toml", *extras, "--constraints", str(constraints)]
        subprocess.run(
            [*command, *PLATFORM, *FORMAT, "-o", str(out)], cwd=PROJECT, check=True, stdout=subprocess.DEVNULL
        )
        GPU_LOCK.write_text("".join(sorted(out.read_text().splitlines(keepends=True))))
    for line in changes(pins(present), pins(GPU_LOCK.read_text())):
        print(line)


if __name__ == "__main__":
    resolve(sys.argv[1])
