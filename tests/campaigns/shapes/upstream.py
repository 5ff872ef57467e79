"""The shapes of `families` through vLLM's own NixlConnector, for docs/benchmarks.md.

Each pair runs in a process group of its own, which is killed after LIMIT_S: engines may hang.
Tandem's side of the table is the campaign `families`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine.exceptions import EngineDeadError

from testing import fork_server
from testing.engines import Answer, generate, start_engine
from testing.identity import MAX_TOKENS, difference, prompts
from testing.models import lfm2, llama
from testing.processes import children, free_cores
from testing.sequential_proxy import PRODUCE
from testing.transfer_bytes import nixl_bytes
from tests.campaigns.runner import Report
from tests.campaigns.shapes.families import FAMILIES, LONGEST, Family

LIMIT_S, REQUEST_LIMIT_S = 240, 90
_HALF, _WHOLE, _FEWER = {"block_size": 32}, {"block_size": 64}, ((2, 1), (1, 2), (4, 2), (2, 4))
EXTRAS: dict[str, Family] = {
    "lfm2": Family(lfm2, pairs=((1, 1), (2, 2))),
    "llama_1_kv_head": Family(partial(llama, kv_heads=1), pairs=_FEWER),
    "llama_2_kv_heads": Family(partial(llama, kv_heads=2), pairs=_FEWER),
    "llama_blocks_32_to_64": Family(llama, prefill=_HALF, decode=_WHOLE, pairs=((1, 1),)),
    "llama_blocks_64_to_32": Family(llama, prefill=_WHOLE, decode=_HALF, pairs=((1, 1),)),
}
# A family whose decode engine cannot compute a prompt has no reference here.
CASES = {name: family for name, family in FAMILIES.items() if family.alone == "decode"} | EXTRAS
_PROMPTS = prompts(26, LONGEST, seed=7)
TODO = [*_PROMPTS[1::3], _PROMPTS[12]]


def _external_tokens() -> float:
    """Return the prompt tokens that the engine that started last, decode, did not compute."""
    name, source = "vllm:prompt_tokens_by_source_total", "external_kv_transfer"
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == name and sample.labels["source"] == source)


async def _compare(connector: str, family: Family, tp: tuple[int, int], model: str) -> dict[str, Any]:
    """Return the verdict on one pair."""
    started = []
    try:
        for role, size, own in (("kv_producer", tp[0], family.prefill), ("kv_consumer", tp[1], family.decode)):
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(get_open_port())
            transfer = KVTransferConfig(kv_connector=connector, kv_role=role)
            started.append(start_engine(model, size, None, kv_transfer_config=transfer, **(family.engine | own)))
    except Exception as error:
        return {"verdict": "refuses", "reason": f"an engine does not start: {error!r}"[:300]}
    free_cores(sorted(children()))  # NixlConnector's workers pin themselves to one core
    prefill, decode = started

    async def in_turn(prompt: list[int]) -> Answer:
        first = await generate(prefill, prompt, 1, PRODUCE, logprobs=None)
        return await generate(decode, prompt, MAX_TOKENS, first.transfer)

    wrong: list[str] = []
    moved = 0
    for prompt, reference in [(prompt, await generate(decode, prompt, MAX_TOKENS)) for prompt in TODO]:
        before = (nixl_bytes(), _external_tokens())
        try:
            answer = await asyncio.wait_for(in_turn(prompt), REQUEST_LIMIT_S)
        except TimeoutError:
            return {"verdict": "hangs", "reason": f"no answer to {len(prompt)} tokens"}
        except EngineDeadError:
            return {"verdict": "crashes", "reason": f"an engine dies at {len(prompt)} tokens"}
        except Exception as error:
            return {"verdict": "refuses", "reason": f"{len(prompt)} tokens: {error!r}"[:300]}
        await asyncio.sleep(0.2)
        if len(answer.tokens) < MAX_TOKENS:
            return {"verdict": "refuses", "reason": f"{len(prompt)} tokens: the request ends with an error"}
        if problem := difference(reference, answer, family.tolerance):
            wrong.append(f"{len(prompt)} tokens: {problem}")
        elif len(prompt) > 1:
            now = (nixl_bytes(), _external_tokens())
            moved += all(after > then for after, then in zip(now, before, strict=True))
    movable = sum(len(prompt) > 1 for prompt in TODO)
    verdict = "wrong" if wrong else "works" if moved == movable else "recomputes"
    return {"verdict": verdict, "reason": "; ".join(wrong)[:600], "moved": moved, "movable": movable}


def _inner(connector: str, name: str, tp: tuple[int, int], folder: Path) -> None:
    """Process of one pair; the parent ends it with its process group."""
    os.setsid()
    fork_server.prepare()
    model = CASES[name].build(folder / f"model-{name}-{tp[0]}-{tp[1]}")
    found = asyncio.run(_compare(connector, CASES[name], tp, model))
    (folder / "partial.json").write_text(json.dumps(found))
    (folder / "partial.json").rename(folder / "found.json")
    time.sleep(LIMIT_S)  # engines may hang when they are shut down


def upstream(report: Report, *, connector: str = "NixlConnector", only: str = "") -> None:
    """Verdicts: works, recomputes, wrong, refuses, crashes, hangs. ``only``: FAMILY:P:D."""
    out = report.folder / "found.json"
    todo = [(name, tp) for name, family in CASES.items() for tp in family.pairs]
    for name, tp in todo:
        if not re.search(only, f"{name}:{tp[0]}:{tp[1]}"):
            continue
        out.unlink(missing_ok=True)
        began = time.monotonic()
        process = multiprocessing.get_context("spawn").Process(target=_inner, args=(connector, name, tp, report.folder))
        process.start()
        assert process.pid is not None
        while process.is_alive() and not out.exists() and time.monotonic() < began + LIMIT_S:
            time.sleep(0.2)
        found = {"verdict": "hangs", "reason": f"stopped after {LIMIT_S} s"}
        if out.exists():
            found = json.loads(out.read_text())
        elif not process.is_alive():
            found = {"verdict": "crashes", "reason": "the process of both engines ends"}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        report.row(connector=connector, family=name, tp=f"{tp[0]}:{tp[1]}", **found)
