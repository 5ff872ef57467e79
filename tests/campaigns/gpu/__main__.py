"""Check Tandem's transport, fences and digests on this machine's NVIDIA GPU: ``make gpu-check``.

    python -m tests.campaigns.gpu [--device cuda:0] [--out gpu.json]

Needs torch, numpy, xxhash and NIXL; checks with missing packages are skipped by name. If vLLM is
installed, engines are compared as well. Without a GPU it lists the checks and exits with 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BULK_BYTES = 2**30
ENGINES_S = 1800.0
PACKAGE = __spec__.parent if __spec__ else "tests.campaigns.gpu"


@dataclass(frozen=True)
class Part:
    """Checks of one module: names, and the packages that they need."""

    title: str
    names: tuple[str, ...]
    needs: tuple[str, ...]


STEPS = Part(
    "steps",
    (
        "an_event_passes_after_its_kernels",
        "layers_come_out_in_order",
        "digests_are_a_cpus",
        "a_digest_does_not_wait_for_the_forward_pass",
    ),
    ("torch", "numpy", "xxhash"),
)
CONFORMANCE = Part(
    "conformance",
    (
        "a_write_moves_its_bytes_and_no_others",
        "a_whole_region_is_written",
        "ten_thousand_fragments",
        "many_writes_at_once",
        "writes_outside_registered_memory_are_refused",
        "poll_waits_for_the_last_byte",
        "messages_arrive_whole_and_once",
        "a_connection_is_made_anew",
        "digests_agree",
        "a_busy_device_does_not_delay_a_write",
        "bandwidth",
    ),
    ("torch", "numpy", "xxhash", "nixl"),
)
ENGINES = Part("engines", ("identity_of_two_shapes",), ("torch", "numpy", "xxhash", "nixl", "vllm", "transformers"))
PARTS = (STEPS, CONFORMANCE, ENGINES)


@dataclass(frozen=True)
class Result:
    """``verdict`` is ok, FAILED or skipped; ``found`` is the observation, or the reason."""

    check: str
    verdict: str
    found: str
    seconds: float


def gpus() -> list[str]:
    """Return the GPUs that the driver lists, one line each."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "nixl", "vllm", "numpy", "xxhash"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def run(part: Part, device: str) -> Iterator[Result]:
    """Run the checks of a part, each independently of the others' results."""
    missing = [name for name in part.needs if find_spec(name) is None]
    if missing:
        yield from (Result(name, "skipped", f"needs {', '.join(missing)}", 0.0) for name in part.names)
        return
    try:
        if part is ENGINES:
            yield _timed(part.names[0], _identity)
        elif part is STEPS:
            yield from _run_steps(device)
        else:
            yield from _run_conformance(device)
    except Exception:
        yield Result(part.title, "FAILED", f"the checks could not start:\n{traceback.format_exc()}", 0.0)


def _run_steps(device: str) -> Iterator[Result]:
    import torch

    from tests.campaigns.gpu import steps
    from tests.campaigns.gpu.device import set_current

    set_current(torch.device(device))
    for case in steps.CASES:
        yield _timed(case.__name__, lambda case=case: case(torch.device(device)))  # type: ignore[misc]


def _run_conformance(device: str) -> Iterator[Result]:
    import torch

    from tests.campaigns.gpu import conformance
    from tests.campaigns.gpu.pair import Pair

    with Pair(torch.device(device), BULK_BYTES) as pair:

        def play(case: Callable[[Pair], str]) -> str:
            pair.refill()
            return case(pair)

        for case in conformance.CASES:
            yield _timed(case.__name__, lambda case=case: play(case))  # type: ignore[misc]


def _identity() -> str:
    """Run the engines in a separate process: vLLM starts its engine cores before it uses a GPU."""
    command = [sys.executable, "-m", f"{PACKAGE}.engines"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENGINES_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return "; ".join(line for line in done.stdout.splitlines() if line.startswith("identity: "))


def _timed(name: str, work: Callable[[], str]) -> Result:
    began = time.monotonic()
    try:
        found, verdict = work(), "ok"
    except Exception as error:
        found, verdict = f"{error!r}\n{traceback.format_exc()}", "FAILED"
    return Result(name, verdict, found, round(time.monotonic() - began, 2))


def describe() -> str:
    """Print the checks, without importing their modules."""
    lines = ["tandem: no NVIDIA GPU is listed by nvidia-smi. On a machine with one, this would check:"]
    for part in PARTS:
        lines += [f"  {part.title} (needs {', '.join(part.needs)})"]
        lines += [f"    {name.replace('_', ' ')}" for name in part.names]
    lines.append("The checks that need no GPU run on the CPU in tests/gpu, as part of make test.")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a check has failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="torch's name of the device; cpu runs what a CPU can")
    parser.add_argument("--out", type=Path, help="write the results to this file, too")
    options = parser.parse_args(argv)
    found = gpus()
    if options.device != "cpu":
        if not found:
            print(describe())
            return 0
        if problem := _unusable():
            print(f"tandem: {found[0]} is here, and cannot be used: {problem}")
            return 1
    about: dict[str, Any] = {"device": options.device, "gpus": found, "cores": os.cpu_count(), "versions": versions()}
    print(json.dumps(about), flush=True)
    results = []
    for part in PARTS if options.device != "cpu" else PARTS[:2]:
        for result in run(part, options.device):
            results.append(result)
            print(f"{result.verdict:8} {result.seconds:7.2f} s  {result.check}: {result.found}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(about | {"results": [asdict(each) for each in results]}, indent=1) + "\n")
    failed = sum(result.verdict == "FAILED" for result in results)
    skipped = sum(result.verdict == "skipped" for result in results)
    print(f"{len(results) - failed - skipped} checks passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


def _unusable() -> str:
    if find_spec("torch") is None:
        return f"torch is not installed for {sys.executable}; set GPU_PYTHON to a Python that has it"
    torch = importlib.import_module("torch")
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} does not find CUDA"


if __name__ == "__main__":
    sys.exit(main())
