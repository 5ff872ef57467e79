"""vLLM's own scheduler with the store, driven at random.

    python -m tests.campaigns.store.scheduling --steps 4000

Nothing of vLLM is replaced: its configuration, its (asynchronous) scheduler, its block pool. Its
ranks have real memory. Their "model" writes for each token a word that follows from all tokens
before it, and first checks that all words that attention would read are present. So a block that is
loaded wrong, too late, or stored after its reuse is detected where it is read. Engines of one run
share a path, and are replaced by others with other TP and block sizes. Images of equal size stand
in some prompts; the model reads their contents, and vLLM sees the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connectors.planning.layout import GroupKind
from connectors.protocol.agent_metadata import ModelIdentity
from connectors.store.settings import parse_settings
from connectors.vllm_hma.kv_store.orders import StoreOrders
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from connectors.vllm_hma.orders import Orders
from connectors.vllm_hma.reports import WorkerReport
from connectors.vllm_hma.store_connector import TandemStoreConnector
from tests.planning.builders import Rank, Shape, make_engine, with_field
from tests.vllm_contract.caches import cache_config, full, sliding, vllm_config

WINDOW_TOKENS, CHUNK, MAX_MODEL_LEN = 48, 32, 512
MAX_TOKENS_A_STEP, MAX_REQUESTS, MAX_PROMPT_TOKENS = 64, 12, 200
STOP_TOKEN = 7
IMAGE_TOKEN, IMAGE_AT, IMAGE_TOKENS = 8, 25, 12
"""Images lie across the end of a chunk."""

ENDS_WITHIN_STEPS = 3000
MODEL = ModelIdentity("weights", "float32", "float32", "test")
HEADS = 4

Kind = tuple[int, int, bool, bool, int, bool]
KINDS: list[Kind] = [
    (blocks, block_tokens, prefixes, ahead, tp, states)
    for blocks, block_tokens, tp in ((40, 16, 1), (90, 16, 2), (60, 32, 4))
    for prefixes, states in ((False, False), (True, False), (False, True))
    for ahead in (False, True)
]
"""Engines: blocks in the pool, tokens per block, prefix caching, asynchronous scheduling, TP
size, and whether the last group keeps states instead of a window.
"""

Words = npt.NDArray[np.uint64]


class Engine:
    """One engine core without its model."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        blocks: int,
        block_tokens: int,
        prefixes: bool,
        ahead: bool,
        tp: int,
        states: bool,
    ) -> None:
        self.rng = random.Random(seed)
        # Often too few blocks and too little staging.
        store = {"path": str(folder), "disk_gib": 400 / (1 << 18), "chunk_tokens": CHUNK, "staging_mib": 1}
        config = vllm_config.__wrapped__(
            kv_transfer_config=KVTransferConfig(
                kv_connector="TandemStoreConnector",
                kv_connector_module_path="connectors.vllm_hma.store_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"store": store | {"lookup_s": 0.2, "load_s": 1.0, "always_load": True}},
            ),
            block_size=block_tokens,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_TOKENS_A_STEP,
            max_num_seqs=MAX_REQUESTS,
            enable_prefix_caching=prefixes,
            # States exist where steps end.
            long_prefill_token_threshold=CHUNK if states else 0,
        )
        # vLLM turns it off where there is no GPU (platforms/cpu.py).
        config.scheduler_config.async_scheduling = ahead
        config.cache_config.num_gpu_blocks = blocks
        names = [f"model.layers.{number}.self_attn.attn" for number in range(3)]
        window = sliding(sliding_window=WINDOW_TOKENS, block_size=block_tokens)
        state = MambaSpec(block_size=MAX_MODEL_LEN, shapes=((4,),), dtypes=(torch.float32,))
        last: KVCacheSpec = state if states else window
        cache = cache_config(([names[0]], full(block_size=block_tokens)), ([names[1]], window), ([names[2]], last))
        cache.num_blocks = blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        # As vLLM sets them for a model that reads images.
        self.scheduler.encoder_cache_manager = EncoderCacheManager(2 * IMAGE_TOKENS)
        self.scheduler.max_num_encoder_input_tokens = 2 * IMAGE_TOKENS
        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(hash_block_size, hashing)
        connector = self.scheduler.get_kv_connector()
        assert isinstance(connector, TandemStoreConnector)
        self.connector = connector
        self.aggregator = KVOutputAggregator.from_connector(connector, tp)
        sliding_group = (GroupKind.SLIDING, WINDOW_TOKENS, 1)
        last_group = (GroupKind.STATE, None, 1) if states else sliding_group
        groups = ((GroupKind.FULL, None, 1), sliding_group, last_group)
        style = self.rng.choice(["head_major", "token_major", "heads_outer"])
        shape = Shape(HEADS, style, block_tokens, 8, blocks, 0, True, groups, block_tokens)
        self.ranks = make_engine(shape, tp)
        self.states = states
        settings = parse_settings({"store": store})
        self.workers = [StoreWorker(settings, MAX_MODEL_LEN, SpoiledSteps(1)) for _ in self.ranks]
        for worker, rank in zip(self.workers, self.ranks, strict=True):
            worker.register(with_field(rank.layout, 2, block_tokens=MAX_MODEL_LEN) if states else rank.layout)
        connector.set_xfer_handshake_metadata_pp_aware(
            {(0, number): worker.rank_cache(MODEL) for number, worker in enumerate(self.workers)}
        )
        self.depth = config.max_concurrent_batches
        # A step, and the block tables that it was scheduled with.
        self.batches: deque[tuple[SchedulerOutput, dict[str, tuple[list[int], ...]]]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.block_tokens = block_tokens
        self.counts = Counter[str]()
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.baseline = self.pool.get_num_free_blocks()

    def close(self) -> None:
        self.counts += Counter({f"store: {key}": count for key, count in self.store.counts.items()})
        self.scheduler.shutdown()

    @property
    def store(self) -> Any:
        return self.connector.store.store

    # ---- requests -------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Return a prompt that may share a prefix with others, of this engine or of an earlier
        one.
        """
        rng = self.rng
        shared = rng.choice([0, 40, 70, 130, 180])
        topic = rng.randrange(3)
        length = rng.choice([1, 33, rng.randint(3, 60), rng.randint(60, MAX_PROMPT_TOKENS)])
        prompt = ([20 + topic] * shared + [rng.randint(30, 500) for _ in range(MAX_PROMPT_TOKENS)])[:length]
        sampling = SamplingParams(max_tokens=rng.choice([1, 5, 60]))
        sampling.stop_token_ids = [STOP_TOKEN]
        salt = "salt" if rng.random() < 0.1 else None
        self.tokens[name] = list(prompt)
        features, image, end = [], rng.choice([0, 1, 2]), IMAGE_AT + IMAGE_TOKENS
        if image and len(prompt) >= end:
            position = PlaceholderRange(IMAGE_AT, IMAGE_TOKENS)
            features = [MultiModalFeatureSpec(None, "image", f"{image:064x}", position)]
            prompt[IMAGE_AT:end] = [IMAGE_TOKEN] * IMAGE_TOKENS
            self.tokens[name][IMAGE_AT:end] = [1000 * image + number for number in range(IMAGE_TOKENS)]
            self.counts["images"] += 1
        request = Request(name, prompt, sampling, None, mm_features=features, block_hasher=self.hasher, cache_salt=salt)
        self.scheduler.add_request(request)

    def abort(self) -> None:
        if self.scheduler.requests:
            self.counts["aborted"] += 1
            name = self.rng.choice([*self.scheduler.requests])
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt_all(self) -> None:
        self.counts["resets"] += 1
        with contextlib.suppress(RuntimeError):
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    # ---- the engine's loop ----------------------------------------------------------------------

    def step(self) -> None:
        """Run like EngineCore: fill the queue of batches, else take the oldest one's output."""
        if len(self.batches) < self.depth and self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.counts["preempted"] += len(output.preempted_req_ids or ())
            if not output.num_scheduled_tokens:
                # Every request waits for the store's threads, so give them time.
                time.sleep(0.0005)
            manager = self.scheduler.kv_cache_manager
            tables = {name: manager.get_block_ids(name) for name in output.num_scheduled_tokens}
            self.batches.append((output, tables))
            if len(self.batches) < self.depth and self.rng.random() < 0.8:
                return
        if self.batches:
            output, tables = self.batches.popleft()
            self.scheduler.update_from_output(output, self.execute(output, tables))

    def execute(self, output: SchedulerOutput, tables: dict[str, tuple[list[int], ...]]) -> ModelRunnerOutput:
        orders = orders_of(output)
        for load in orders.loads:
            self.counts["loads"] += 1
            self.counts["tokens loaded"] += load.end_token - load.start_token
        for worker in self.workers:
            worker.load(orders)
        sampled = self.forward(output, tables)
        outputs = []
        for worker in self.workers:
            worker.store(orders)
            each = ModelRunnerOutput(list(sampled), {r: i for i, r in enumerate(sampled)}, list(sampled.values()))
            each.kv_connector_output = KVConnectorOutput(
                invalid_block_ids=worker.not_loaded(), kv_connector_worker_meta=WorkerReport(store=worker.report())
            )
            outputs.append(each)
        together = self.aggregator.aggregate(list(outputs))
        assert together is not None
        return together

    def forward(self, output: SchedulerOutput, tables: dict[str, tuple[list[int], ...]]) -> dict[str, list[int]]:
        """Check what attention reads, write the step's KV, and sample."""
        cached = output.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            request = self.scheduler.requests.get(name)
            if name in cached.resumed_req_ids and request is not None:
                del self.tokens[name][request.num_prompt_tokens + outputs :]
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            start, stop = before[name], before[name] + count
            words = prefix_words(self.tokens[name])
            if self.states:
                self.check_state(name, tables[name][2], words, start)
                self.write_state(tables[name][2], words, min(stop, len(words)))
            for group in range(2 if self.states else 3):
                seen = 0 if group == 0 else max(0, start - WINDOW_TOKENS + 1)
                self.check(name, group, tables[name][group], words, seen, start)
                self.write(group, tables[name][group], words, start, min(stop, len(words)))
            sampled[name] = []
            if stop >= len(self.tokens[name]):
                token = STOP_TOKEN if self.rng.random() < 0.02 else self.rng.randint(10, 500)
                self.tokens[name].append(token)
                sampled[name] = [token]
        return sampled

    def check(self, name: str, group: int, table: list[int], words: Words, start: int, stop: int) -> None:
        for rank in self.ranks:
            blocks, rows = self.where(table, start, stop)
            for at, head in enumerate(rank.heads):
                got = view(rank, group)[blocks, at, rows]
                if not np.array_equal(got, words[start:stop] + np.uint64(head * 8 + group)):
                    bad = start + int(np.flatnonzero(got != words[start:stop] + np.uint64(head * 8 + group))[0])
                    raise AssertionError(f"{name}: group {group}, token {bad} of {start} to {stop} is not its own")

    def write(self, group: int, table: list[int], words: Words, start: int, stop: int) -> None:
        for rank in self.ranks:
            blocks, rows = self.where(table, start, stop)
            for at, head in enumerate(rank.heads):
                view(rank, group)[blocks, at, rows] = words[start:stop] + np.uint64(head * 8 + group)

    def check_state(self, name: str, table: list[int], words: Words, start: int) -> None:
        """Check the state after ``start`` tokens, in all rows of the request's block."""
        for rank in self.ranks:
            for at, head in enumerate(rank.heads):
                if start and not (view(rank, 2)[table[0], at] == words[start - 1] + np.uint64(head * 8 + 2)).all():
                    raise AssertionError(f"{name}: the state after {start} tokens is not its own")

    def write_state(self, table: list[int], words: Words, stop: int) -> None:
        for rank in self.ranks:
            for at, head in enumerate(rank.heads):
                view(rank, 2)[table[0], at] = words[stop - 1] + np.uint64(head * 8 + 2)

    def where(self, table: list[int], start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        tokens = np.arange(start, stop)
        return np.asarray(table, np.int64)[tokens // self.block_tokens], tokens % self.block_tokens

    # ---- a whole run ----------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Run this number of random steps, then until all requests have ended; check that
        nothing is left.
        """
        number = 0
        for _ in range(steps):
            while len(self.scheduler.requests) < 20 and self.rng.random() < 0.3:
                self.add(f"r{number}")
                number += 1
            if self.rng.random() < 0.03:
                self.abort()
            if self.rng.random() < 0.01:
                self.preempt_all()
            self.step()
        self.counts["steps"] += steps
        self.counts["requests"] += number
        for _ in range(ENDS_WITHIN_STEPS):
            if not self.scheduler.has_requests() and not self.batches:
                break
            self.step()
        assert not self.scheduler.requests, f"requests have not ended: {list(self.scheduler.requests)}"
        assert self.pool.get_num_free_blocks() == self.baseline, "blocks are lost"
        until = time.monotonic() + 20.0
        while not self.store.idle() and time.monotonic() < until:
            time.sleep(0.001)
        assert self.store.staging.used_bytes == 0, "staging memory is leaked"
        assert self.connector.store.remembered == 0, "the connector keeps state of ended requests"


def orders_of(output: SchedulerOutput) -> StoreOrders:
    assert isinstance(output.kv_connector_metadata, Orders)
    assert output.kv_connector_metadata.store is not None
    return output.kv_connector_metadata.store


def view(rank: Rank, group: int) -> npt.NDArray[np.uint64]:
    """Return (blocks, heads, rows) of the group's layer, one word per token."""
    words: npt.NDArray[np.uint64] = rank.views[group][0].view(np.uint64)[..., 0]
    return words


def prefix_words(tokens: list[int]) -> Words:
    """Return a word for each token that follows from it and all tokens before it."""
    words, value = np.empty(len(tokens), np.uint64), 1469598103934665603
    for number, token in enumerate(tokens):
        value = (value ^ token) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
        words[number] = value
    return words


def run(folder: Path, seed: int, steps: int, kinds: list[Kind]) -> Counter[str]:
    """Run one engine of each kind after the other, over one path."""
    totals = Counter[str]()
    for number, kind in enumerate(kinds):
        engine = Engine(seed + number, folder, *kind)
        try:
            engine.run(steps)
        except BaseException:
            print(f"BROKEN: engine {number}, seed {seed + number}, {kind}")
            raise
        finally:
            engine.close()
        totals += engine.counts
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="of all engines together")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        totals = run(Path(folder) / "store", options.seed, -(-options.steps // len(KINDS)), KINDS)
    for what, count in sorted(totals.items()):
        print(f"{count:>12,} {what}")
    print("every token that attention read was right, and nothing is left")


if __name__ == "__main__":
    main()
