"""Check Tandem on this machine's NVIDIA GPUs within five minutes: ``make gpu-check``.

Transport, fences and digests need torch, numpy, xxhash and NIXL. With vLLM and Ray it also compares
engines, asks the service, and measures TTFT over one engine, Tandem and NixlConnector. Checks with
missing packages are skipped by name. Without a GPU it lists the checks and exits with 0.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.campaigns.runner import Report

BULK_BYTES = 2**30
WITHIN_S = 300.0
AT_ONCE = 2
"""Number of programs that run at once. Each starts two or three engines, mostly on the CPU."""
PACKAGE = "tests.campaigns.gpu"


@dataclass(frozen=True)
class Part:
    """Checks of one module: names, and the packages that they need.

    ``program``: each check is a process of ``programs.py``, because vLLM starts its engine cores
    before it uses a GPU.
    """

    title: str
    names: tuple[str, ...]
    needs: tuple[str, ...]
    program: bool = False


def _names(module: str) -> tuple[str, ...]:
    """Return the public functions of a module; imports nothing, as torch may be missing."""
    body = ast.parse(Path(__file__).with_name(f"{module}.py").read_text()).body
    return tuple(each.name for each in body if isinstance(each, ast.FunctionDef) and each.name[0] != "_")


_TENSORS = ("torch", "numpy", "xxhash")
_ENGINES = (*_TENSORS, "nixl", "vllm", "transformers")
STEPS = Part("steps", _names("steps"), _TENSORS)
CONFORMANCE = Part("conformance", _names("conformance"), (*_TENSORS, "nixl"))
SERVICE = Part("service", ("the_service_answers",), (*_ENGINES, "ray", "uvicorn"), program=True)
ENGINES = Part("engines", ("identity_of_two_shapes",), _ENGINES, program=True)
ARMS = ("tandem", "nixl_connector", "one_engine")
PARTS = (STEPS, CONFORMANCE, SERVICE, ENGINES, *(Part(f"TTFT of {arm}", (arm,), _ENGINES, True) for arm in ARMS))


@dataclass(frozen=True)
class Result:
    """``verdict`` is ok, FAILED or skipped; ``found`` is the observation, or the reason, and
    ``figures`` are the measurements.
    """

    check: str
    verdict: str
    found: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


def gpus() -> list[str]:
    """Return the GPUs that the driver lists, one line each."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]


def run(part: Part, device: str, folder: Path = Path(), give_up_at: float = math.inf) -> Iterator[Result]:
    """Run the checks of a part, each independently of the others' results.

    ``folder``, ``give_up_at``  of parts with a program: files, and when it is killed
    """
    if missing := [name for name in part.needs if find_spec(name) is None]:
        yield from (Result(name, "skipped", f"needs {', '.join(missing)}", 0.0) for name in part.names)
        return
    try:
        if part.program:
            yield _timed(part.names[0], lambda: _program(part, device, folder, give_up_at))
        else:
            yield from (_run_steps if part is STEPS else _run_conformance)(device)
    except Exception:
        yield Result(part.title, "FAILED", f"the checks could not start:\n{traceback.format_exc()}", 0.0)


def cases(part: Part) -> list[Callable[[Any], Any]]:
    """Return the functions of a part without a program."""
    module = importlib.import_module(f"{PACKAGE}.{part.title}")
    return [getattr(module, name) for name in part.names]


def _run_steps(device: str) -> Iterator[Result]:
    import torch

    from tests.campaigns.gpu.device import set_current

    set_current(torch.device(device))
    for case in cases(STEPS):
        yield _timed(case.__name__, lambda case=case: case(torch.device(device)))  # type: ignore[misc]


def _run_conformance(device: str) -> Iterator[Result]:
    import torch

    from tests.campaigns.gpu.pair import Pair

    for peer in [device] if device == "cpu" or torch.cuda.device_count() < 2 else [device, "cuda:1"]:
        with Pair(torch.device(device), BULK_BYTES, torch.device(peer)) as pair:
            for case in cases(CONFORMANCE):
                name = case.__name__ if peer == device else f"{case.__name__}, {device} to {peer}"
                yield _timed(name, lambda case=case, pair=pair: (pair.refill(), case(pair))[1])  # type: ignore[misc]


def _program(part: Part, device: str, folder: Path, give_up_at: float) -> tuple[str, dict[str, Any]]:
    """Run a part in a process of its own, which vLLM's engine cores are started from."""
    command = [sys.executable, "-m", f"{PACKAGE}.programs", str(folder), part.names[0], device]
    log = folder / f"{part.names[0]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(max(0.0, min(give_up_at - time.monotonic(), threading.TIMEOUT_MAX)))
        except subprocess.TimeoutExpired:
            # Out of time. The service's launcher has its own session, and notices its parent's end.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    said = log.read_text(errors="replace")
    if code:
        raise RuntimeError(f"{' '.join(command)}: {code}\n{said[-1500:]}")
    figures = re.findall(r"^figures: (.*)$", said, re.MULTILINE)
    return "; ".join(re.findall(r"^found: (.*)$", said, re.MULTILINE)), json.loads(figures[-1] if figures else "{}")


def _run_all(parts: tuple[Part, ...], device: str, give_up_at: float) -> Iterator[Result]:
    """Run parts in this process first, alone, then the programs, AT_ONCE at once."""
    for part in parts:
        if not part.program:
            yield from run(part, device)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        programs = [part for part in parts if part.program]
        for results in pool.map(lambda part: list(run(part, device, Path(folder), give_up_at)), programs):
            yield from results


def _timed(name: str, work: Callable[[], Any]) -> Result:
    """Return the result of a check, which returns its observation, or that and figures."""
    began = time.monotonic()
    figures: dict[str, Any] = {}
    try:
        found, verdict = work(), "ok"
        if isinstance(found, tuple):
            found, figures = found
    except Exception as error:
        found, verdict = f"{error!r}\n{traceback.format_exc()}", "FAILED"
    return Result(name, verdict, found, round(time.monotonic() - began, 2), figures)


def gpu_check(report: Report, *, on: str = "cuda:0", engines: bool = False, within_s: float = WITHIN_S) -> None:
    """``on``: torch's name of the device; ``cpu`` rehearses, with ``engines`` the engines' checks,
    too. ``within_s``: limit of all checks together.
    """
    found = gpus()
    report.row(device=on, gpus=found, cores=os.cpu_count())
    if on != "cpu" and not found:
        report.row(not_run={part.title: part.names for part in PARTS}, reason="nvidia-smi lists no GPU")
        return
    if problem := _unusable() if on != "cpu" else "":
        raise RuntimeError(f"{found[0]} is here, and cannot be used: {problem}")
    parts = PARTS if on != "cpu" or engines else (STEPS, CONFORMANCE)
    for result in _run_all(parts, on, time.monotonic() + within_s):
        report.row(**asdict(result))
        report.check(result.verdict != "FAILED", f"{result.check}: {result.found}")


def _unusable() -> str:
    if find_spec("torch") is None:
        return f"torch is not installed for {sys.executable}; set GPU_PYTHON to a Python that has it"
    torch = importlib.import_module("torch")
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} does not find CUDA"
