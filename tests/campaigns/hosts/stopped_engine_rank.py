"""A rank of a real prefill engine is stopped during a write and outlives its core: no foreign byte.

    python -m tests.campaigns.hosts.stopped_engine_rank --count 50

(``make stopped-rank``.) vLLM engines with Tandem's connector over TCP, prefill at TP 2, decode at
TP 1, one decode engine for all rounds. While the rank is stopped, requests use every block of
decode's pool outside quarantine. Digests of all blocks show what changes when the rank continues.
``stopped_rank.py`` does the same without engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from vllm.v1.engine.async_llm import AsyncLLM

from testing import fork_server
from testing.engines import describe, generate, start_engine
from testing.identity import MAX_TOKENS, random_prompt
from testing.models import wide_llama
from testing.processes import children
from testing.trace import read_trace

RANKS, STOPPED = 2, 1
BLOCKS, BLOCK_TOKENS = 200, 32
PROMPT_TOKENS = 1000
PROMPT_BLOCKS = -(-(PROMPT_TOKENS + MAX_TOKENS) // BLOCK_TOKENS)
LIMITS = {"handshake_s": 6.0, "progress_s": 3.0, "alive_s": 0.5, "cancel_s": 0.5, "lease_s": 5.0}
WITHIN_S = 90.0


@dataclass(frozen=True)
class Outcome:
    """Observations of one round.

    ``mid_write``: the rank was stopped with a write posted. ``late_blocks`` changed in quarantine
    when it continued, ``foreign_blocks`` outside; ``watched_blocks`` are those outside. ``right``:
    the victim's answer equals that of an engine alone. ``clean``: the pool is at its baseline.
    """

    mid_write: bool
    right: bool
    watched_blocks: int
    foreign_blocks: int
    late_blocks: int
    clean: bool

    @property
    def broken(self) -> bool:
        return not self.right or bool(self.foreign_blocks) or not self.clean


@dataclass(frozen=True)
class Prefill:
    """A prefill engine and the process ids of its core and its ranks."""

    engine: AsyncLLM
    core: int
    ranks: dict[int, int]


def start_prefill(model: str, trace: Path) -> Prefill:
    trace.touch()
    before = children()
    engine = start_engine(
        model,
        RANKS,
        "kv_producer",
        transfer=LIMITS | {"trace_path": str(trace)},
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=BLOCKS,
    )
    core, ranks = 0, {}
    for pid in children() - before:
        title = " ".join(psutil.Process(pid).cmdline())
        if rank := re.search(r"Worker_TP(\d+)", title):
            ranks[int(rank[1])] = pid
        elif "EngineCore" in title:
            core = pid
    if not core or ranks.keys() != set(range(RANKS)):
        raise RuntimeError(f"the processes of the prefill engine are not found: core {core}, ranks {ranks}")
    return Prefill(engine, core, ranks)


def writes(trace: Path, event: str) -> set[int]:
    """Return the ids of the writes that the rank to stop has posted (``write``) or completed
    (``written``).
    """
    return {each["write"] for each in read_trace(trace) if each["rank"] == STOPPED and each["event"] == event}


async def digests(decode: AsyncLLM) -> list[str]:
    found: list[list[str]] = await decode.collective_rpc("block_digests")
    return found[0]


async def play(decode: AsyncLLM, model: str, trace: Path, number: int) -> Outcome:
    """Run one round with a new prefill engine."""
    prefill = start_prefill(model, trace)
    stopped = prefill.ranks[STOPPED]
    try:
        address = await describe(prefill.engine)
        prompt, transfer_id = random_prompt(PROMPT_TOKENS, number), uuid.uuid4().hex
        leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        first = asyncio.ensure_future(generate(prefill.engine, prompt, 1, leg, logprobs=None))
        victim = asyncio.ensure_future(generate(decode, prompt, MAX_TOKENS, address | {"transfer_id": transfer_id}))
        await until(lambda: bool(writes(trace, "write")) or victim.done(), "a write")
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: psutil.Process(stopped).status() == psutil.STATUS_STOPPED, "the rank's stop")
        mid_write = bool(writes(trace, "write") - writes(trace, "written"))
        os.kill(prefill.core, signal.SIGKILL)
        answer = await asyncio.wait_for(victim, WITHIN_S)
        await asyncio.gather(first, return_exceptions=True)

        before = await digests(decode)
        fill = [random_prompt(PROMPT_TOKENS, 1000 * (number + 1) + k) for k in range(BLOCKS // PROMPT_BLOCKS + 1)]
        await asyncio.gather(*(generate(decode, each, MAX_TOKENS) for each in fill))
        filled = await digests(decode)
        watched = [block for block in range(BLOCKS) if before[block] != filled[block]]

        os.kill(stopped, signal.SIGCONT)
        await until(lambda: not psutil.pid_exists(stopped), "the rank's end")
        await asyncio.sleep(1.0)
        after = await digests(decode)
        changed = {block for block in range(BLOCKS) if filled[block] != after[block]}

        reference = await generate(decode, prompt, MAX_TOKENS)
        return Outcome(
            mid_write=mid_write,
            right=answer.tokens == reference.tokens,
            watched_blocks=len(watched),
            foreign_blocks=len(changed & set(watched)),
            late_blocks=len(changed - set(watched)),
            clean=await back_at_baseline(decode),
        )
    finally:
        for pid in (prefill.core, *prefill.ranks.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        prefill.engine.shutdown()


async def back_at_baseline(decode: AsyncLLM) -> bool:
    """vLLM resets its prefix cache only while no block is in use."""
    give_up_at = time.monotonic() + 30.0
    while not await decode.reset_prefix_cache():
        if time.monotonic() > give_up_at:
            return False
        await asyncio.sleep(0.1)
    return True


async def until(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{what}: not within {WITHIN_S:g} s")
        await asyncio.sleep(0.001)


async def campaign(count: int, folder: Path) -> int:
    model = wide_llama(folder / "model").path
    decode = start_engine(
        model,
        1,
        "kv_consumer",
        transfer=LIMITS,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=BLOCKS,
        worker_extension_cls="tests.campaigns.hosts.block_digests.BlockDigests",
    )
    outcomes: list[Outcome] = []
    try:
        # Rounds in which the write had ended before the stop do not count.
        while sum(each.mid_write for each in outcomes) < count and len(outcomes) < 3 * count + 3:
            number = len(outcomes)
            outcomes.append(await play(decode, model, folder / f"{number}.jsonl", number))
            print(f"{number}: {dataclasses.asdict(outcomes[-1])}", flush=True)
    finally:
        decode.shutdown()
    stopped = sum(each.mid_write for each in outcomes)
    late = sum(bool(each.late_blocks) for each in outcomes)
    broken = sum(each.broken for each in outcomes)
    print(f"{len(outcomes)} rounds, a rank stopped in mid-write in {stopped}, bytes in quarantine came late in {late}")
    print(f"{broken} with a foreign byte, a wrong answer or a leak")
    return 1 if broken or stopped < count else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="rounds in which a rank is stopped in mid-write")
    arguments = parser.parse_args()
    # Shared memory would be written at once. Set before the fork server starts, which copies this
    # environment.
    os.environ["UCX_TLS"] = "tcp,self"
    fork_server.prepare()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(campaign(arguments.count, Path(folder))))


if __name__ == "__main__":
    main()
