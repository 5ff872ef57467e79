"""Run Tandem's checks on the emulated GPU: python -m testing.emulated_gpu [--parallel N] [STEP ...]

``make emulated-gpu`` runs this with the packages of requirements-gpu.lock. It needs a C compiler,
and no GPU. Device memory is host memory, torch operations run on the CPU, Triton kernels are
compiled for sm_90 and then interpreted. So it runs vLLM's own GPU worker and model runner, and it
cannot show times, asynchrony, memory ordering, kernels on hardware, CUDA IPC, or what a graph
capture permits. Each step prints to build/emulated-gpu/STEP.log.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from testing.emulated_gpu.steps import DOCTOR, STEPS, STORE, STREAMS

HERE = Path(__file__).parent
BUILD = Path("build/emulated-gpu").absolute()
LIMIT_S = 1800
KERNEL_TESTS = "digest-kernel"


def cuda_include() -> Path:
    """Return the folder of CUDA's headers in torch's packages."""
    found = find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for include in sorted(Path(folder).glob("cu1*/include")):
            return include
    raise SystemExit("no CUDA headers: install the packages of requirements-gpu.lock (make install DEVICE=gpu)")


def run(step: str) -> bool:
    """Run one step in a process of its own, and print a line of the table."""
    began = time.monotonic()
    log = BUILD / f"{step}.log"
    if step == KERNEL_TESTS:
        tests = "-m pytest -x -p no:cacheprovider --noconftest tests/transport/test_digest_kernel.py"
        command = f"TRITON_INTERPRET=1 {shlex.quote(sys.executable)} {tests}"
    else:
        emulated = f". {HERE}/env.sh {BUILD}/libs {BUILD}/cache"
        command = f"{emulated}; exec {shlex.quote(sys.executable)} -m testing.emulated_gpu.steps {shlex.quote(step)}"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                ["bash", "-c", command],
                stdout=file,
                stderr=file,
                timeout=LIMIT_S,
                env=os.environ | {"PYTHONPATH": path()},
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    lines = log.read_text(errors="replace").splitlines()
    found = next((line.removeprefix("FOUND ") for line in reversed(lines) if line.startswith("FOUND ")), "")
    if step == KERNEL_TESTS:
        found = next((line for line in reversed(lines) if " passed" in line or " failed" in line), "")
    verdict = "ok" if code == 0 else f"FAILED ({code})"
    print(f"{step:18} {verdict:12} {time.monotonic() - began:6.0f} s  {found or log}", flush=True)
    return code == 0


def path() -> str:
    """Return PYTHONPATH with this checkout."""
    return os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))


def main() -> int:
    every = [KERNEL_TESTS, DOCTOR, *STEPS, STORE, STREAMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"one of {json.dumps(every)}; all without one")
    parser.add_argument("--parallel", type=int, default=1, help="steps at a time")
    arguments = parser.parse_args()
    steps = arguments.steps or every
    if unknown := set(steps) - set(every):
        parser.error(f"unknown steps {sorted(unknown)}")
    (BUILD / "cache").mkdir(parents=True, exist_ok=True)
    sources = max(source.stat().st_mtime for source in HERE.glob("*.[ch]"))
    built = BUILD / "libs" / "libnvidia-ml.so.1"  # the last one
    if not built.exists() or built.stat().st_mtime < sources:
        subprocess.run(["bash", HERE / "build.sh", cuda_include(), BUILD / "libs"], check=True)
    with ThreadPoolExecutor(arguments.parallel) as pool:
        return 0 if all(list(pool.map(run, steps))) else 1


if __name__ == "__main__":
    sys.exit(main())
