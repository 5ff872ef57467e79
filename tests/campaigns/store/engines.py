"""Run vLLM engines in a process that a campaign can kill; exchange prompts and answers with it.

    python -m tests.campaigns.store.engines '{"model": ..., "connector": "pair", ...}'

runs the engines of a ``Setup``. The process reads prompts as lines of JSON from standard input and
writes the answers to standard output, in order of completion. ``Engines`` starts the process, and
ends it and all its children with ``kill -9``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypedDict

from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig

from testing import fork_server
from testing.engines import Answer, Pair, describe, generate, start_engine

ROOT = Path(__file__).resolve().parents[3]
Connector = Literal["pair", "store", "none"]


@dataclass(frozen=True)
class Setup:
    """The engines of one process.

    ``connector``     ``pair``: prefill and decode with TandemConnector; ``store``: one engine with
                      TandemStoreConnector; ``none``: one engine without a connector
    ``tp_sizes``      TP sizes of prefill and decode, or of the one engine
    ``chunk_tokens``  chunk size of the store, and the largest number of tokens of a step, because
                      states exist only where a step ends
    ``path``          folder of the store; empty without a connector
    ``engine``        engine arguments of the model's family
    ``disk_gib``      budget of the store's disk tier
    """

    model: str
    connector: Connector
    tp_sizes: tuple[int, ...]
    block_size: int
    chunk_tokens: int
    path: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    disk_gib: float = 2.0


class Reply(TypedDict):
    """An answer, and the sources of its KV.

    ``logprobs``        the best two tokens of each position, with their logprobs
    ``prefill_cached``  prompt tokens that prefill, or the one engine, has not computed
    ``decode_sources``  tokens of all prompts so far, by where decode got the KV of full attention:
                        ``own_cache``, ``store``, ``transfer``; empty without a pair
    """

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    prefill_cached: int
    decode_sources: dict[str, int]
    seconds: float


def as_answer(reply: Reply) -> Answer:
    logprobs = tuple(tuple((token, value) for token, value in position) for position in reply["logprobs"])
    return Answer(tuple(reply["tokens"]), logprobs, None, None)


# ---- the process with the engines --------------------------------------------------------------


async def serve(setup: Setup) -> None:
    """Start the engines, print their block sizes, and answer prompts until killed."""
    pair = await _start(setup)
    sizes = [engine.vllm_config.cache_config.block_size for engine in (pair.prefill, pair.decode)]
    print("ready " + json.dumps(sizes), flush=True)
    lines = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def reply(number: int, prompt: list[int], max_tokens: int) -> None:
        print("reply " + json.dumps([number, await _answer(pair, prompt, max_tokens)]), flush=True)

    async with asyncio.TaskGroup() as tasks:
        while line := await lines.readline():
            tasks.create_task(reply(*json.loads(line)))


async def _start(setup: Setup) -> Pair:
    arguments: dict[str, Any] = {
        "block_size": setup.block_size,
        "max_num_batched_tokens": setup.chunk_tokens,
        "max_num_seqs": 4,
        "max_model_len": 4096,
        # Room for 16,384 tokens, instead of 1 GiB a rank.
        "num_gpu_blocks_override": 16_384 // setup.block_size,
    }
    arguments |= setup.engine
    store = {
        "path": setup.path,
        "disk_gib": setup.disk_gib,
        "chunk_tokens": setup.chunk_tokens,
        "staging_mib": 64,
        "lookup_s": 2.0,
        "load_s": 10.0,
        # The models are so small that to compute a chunk may be faster than to read it.
        "always_load": True,
    }
    if setup.connector == "pair":
        # The process exports the metrics of the engine that starts last: decode.
        prefill, decode = (
            start_engine(setup.model, size, role, transfer={"store": store}, **arguments)
            for size, role in zip(setup.tp_sizes, ("kv_producer", "kv_consumer"), strict=True)
        )
        return Pair(prefill, decode, await describe(prefill))
    if setup.connector == "store":
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="TandemStoreConnector",
            kv_connector_module_path="connectors.vllm_hma.store_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": store},
        )
    engine = start_engine(setup.model, setup.tp_sizes[0], None, **arguments)
    return Pair(engine, engine, {})


async def _answer(pair: Pair, prompt: Sequence[int], max_tokens: int) -> Reply:
    began = monotonic()
    if pair.prefill is pair.decode:
        found = await generate(pair.decode, prompt, max_tokens)
        cached = found.cached_tokens
    else:
        transfer_id = uuid.uuid4().hex
        leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        first = asyncio.ensure_future(generate(pair.prefill, prompt, 1, leg, logprobs=None))
        found = await generate(pair.decode, prompt, max_tokens, pair.address | {"transfer_id": transfer_id})
        cached = (await first).cached_tokens
    return {
        "tokens": list(found.tokens),
        "logprobs": [list(position) for position in found.logprobs],
        "prefill_cached": cached or 0,
        "decode_sources": _decode_sources(),
        "seconds": monotonic() - began,
    }


def _decode_sources() -> dict[str, int]:
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    name = "vllm:tandem_kv_prompt_tokens_total"
    return {sample.labels["source"]: int(sample.value) for sample in samples if sample.name == name}


# ---- the campaign's process --------------------------------------------------------------------


class EnginesEndedError(RuntimeError):
    """The engines ended before they answered. The message quotes errors from their log."""


class Engines:
    """A process with the engines of a ``Setup``; it is killed at the end of a ``with`` block.
    Thread-safe.

    ``block_sizes``  block sizes of prefill and decode. vLLM enlarges the block size of a model
                     with states, and fixes that of some attention backends
    """

    def __init__(self, setup: Setup, log: Path) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Reply]] = {}
        self._ended = self._killed = False
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.campaigns.store.engines", json.dumps(asdict(setup))],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read_replies, daemon=True)
        try:
            self.block_sizes: list[int] = self._read_block_sizes()
        except BaseException:
            self.kill()
            raise
        self._reader.start()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Reply:
        """Return the answer to a prompt. Raises EnginesEndedError if the engines end first."""
        assert self._process.stdin is not None
        found: Future[Reply] = Future()
        with self._lock:
            if self._ended:
                raise self._error()
            number = next(self._numbers)
            self._waiting[number] = found
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps([number, list(prompt), max_tokens]) + "\n")
                self._process.stdin.flush()
        return found.result()

    def kill(self) -> None:
        """Kill all engines and their workers at once (``kill -9``). A second call has no effect."""
        if not self._killed:
            self._killed = True
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read_block_sizes(self) -> list[int]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready "):
                sizes: list[int] = json.loads(line.removeprefix("ready "))
                return sizes
        raise self._error()

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("reply "):
                number, reply = json.loads(line.removeprefix("reply "))
                with self._lock:
                    found = self._waiting.pop(number)
                found.set_result(reply)
        with self._lock:
            self._ended = True
            for found in self._waiting.values():
                found.set_exception(self._error())

    def _error(self) -> EnginesEndedError:
        causes = [line for line in self._log.read_text().splitlines() if "Error" in line]
        return EnginesEndedError("the engines ended: " + "\n".join(causes[:8]))


def main() -> None:
    fork_server.prepare()
    fields = json.loads(sys.argv[1])
    asyncio.run(serve(Setup(**fields | {"tp_sizes": tuple(fields["tp_sizes"])})))


if __name__ == "__main__":
    main()
