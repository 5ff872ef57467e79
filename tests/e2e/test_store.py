"""A conversation over two pairs of engines with a KV store; the first pair is killed between turns.

A part of the campaign ``store-restart``, which kills more pairs, with more models.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine.async_llm import AsyncLLM

from testing.engines import Answer, Pair, describe, generate, start_engine
from testing.identity import difference, random_prompt
from testing.models import gemma3

pytestmark = pytest.mark.engine

CHUNK = 128
ANSWER_TOKENS = 100
FULL_TOKEN_BYTES = 2 * 2 * 4 * 32 * 4
"""Bytes of one token in two layers: keys and values of four heads with 32 floats."""


@contextlib.contextmanager
def pair_of(
    runner: asyncio.Runner, model: str, store: Path, tp_sizes: tuple[int, int], block_size: int
) -> Iterator[Pair]:
    """Start decode, then prefill: the process exports the metrics of the engine that started
    last.
    """
    settings = {"path": str(store), "disk_gib": 1.0, "chunk_tokens": CHUNK, "staging_mib": 64, "lookup_s": 30.0}
    arguments: dict[str, Any] = {
        "block_size": block_size,
        "max_num_batched_tokens": CHUNK,
        "transfer": {"store": settings | {"load_s": 60.0, "always_load": True}},
    }

    async def start(tp_size: int, role: str) -> AsyncLLM:
        return start_engine(model, tp_size, role, **arguments)

    decode = runner.run(start(tp_sizes[1], "kv_consumer"))
    try:
        prefill = runner.run(start(tp_sizes[0], "kv_producer"))
        try:
            yield Pair(prefill, decode, runner.run(describe(prefill)))
        finally:
            prefill.shutdown()
    finally:
        decode.shutdown()


async def turn(pair: Pair, prompt: list[int]) -> tuple[Answer, int]:
    """Send one turn through both engines; return its answer and the tokens that prefill skipped."""
    transfer_id = uuid.uuid4().hex
    leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    first = asyncio.ensure_future(generate(pair.prefill, prompt, 1, leg, logprobs=None))
    answer = await generate(pair.decode, prompt, ANSWER_TOKENS, pair.address | {"transfer_id": transfer_id})
    return answer, (await first).cached_tokens or 0


def stored(path: Path, objects: int) -> None:
    """Wait until the store has this number of objects."""
    end = time.monotonic() + 60.0
    while len(list((path / "objects").glob("*/*"))) < objects:
        assert time.monotonic() < end, "the objects were not written"
        time.sleep(0.05)


def kill(pair: Pair) -> None:
    """Kill both engines and their workers (``kill -9``)."""
    for engine in (pair.prefill, pair.decode):
        manager = engine.engine_core.resources.engine_manager
        for process in manager.processes:
            for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    os.kill(each.pid, signal.SIGKILL)


def counted(name: str, **labels: str) -> float:
    """Return the sum of the series of one metric with these labels."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_the_next_turn_finds_the_last_ones_answer_after_a_kill(tmp_path: Path) -> None:
    """Turn 1 computes 300 + 99 tokens.

    In turn 2, prefill loads its three chunks and computes the rest.
    """
    model, store = gemma3(tmp_path / "gemma3"), tmp_path / "store"
    first = random_prompt(300, 1)
    with asyncio.Runner() as runner:
        with pair_of(runner, model, store, (1, 2), 32) as pair:
            described = [runner.run(describe(engine))["store"] for engine in (pair.prefill, pair.decode)]
            one, loaded = runner.run(turn(pair, first))
            assert loaded == 0
            # Three groups, three chunks. The last chunk ends in the answer, so only decode has it.
            stored(store, 9)
            kill(pair)
        second = [*first, *one.tokens, *random_prompt(60, 2)]
        with pair_of(runner, model, store, (2, 1), 64) as pair:
            described += [runner.run(describe(engine))["store"] for engine in (pair.prefill, pair.decode)]
            # Both roles, both pairs, and any TP and block size: one store for the router.
            assert described == [described[0]] * 4
            assert described[0]["chunk_tokens"] == CHUNK
            # The windows' objects take room, too.
            assert 0 < described[0]["tokens"] < 2**30 / FULL_TOKEN_BYTES
            two, loaded = runner.run(turn(pair, second))
            assert loaded == 3 * CHUNK
            assert counted("vllm:tandem_store_tokens_total", outcome="hit") == 3 * CHUNK
            assert counted("vllm:tandem_store_loaded_bytes_total", tier="disk") > 0
            # Decode loads full attention of the same chunks, and receives the two blocks of 64
            # tokens behind them.
            sent = {group: counted("vllm:tandem_kv_sent_bytes_total", group=str(group)) for group in range(3)}
            assert sent[2] == 2 * 64 * FULL_TOKEN_BYTES, sent
            # A separate engine computes both turns: an empty store has no objects for it.
            assert runner.run(pair.decode.reset_prefix_cache(reset_connector=True))
            for prompt, answer in ((first, one), (second, two)):
                alone = runner.run(generate(pair.decode, prompt, ANSWER_TOKENS))
                assert alone.cached_tokens in (0, None)
                assert difference(alone, answer) is None
                assert runner.run(pair.decode.reset_prefix_cache(reset_connector=True))
