"""vLLM's own scheduler with the store, driven at random.

Its ranks have real memory. Their "model" writes for each token a word that follows from all tokens
before it, and first checks that all words that attention would read are present. So a block that is
loaded wrong, too late, or stored after its reuse is detected where it is read. Engines of one run
share a path, and are replaced by others with other TP and block sizes. Images of equal size stand
in some prompts; the model reads their contents, and vLLM sees the same tokens.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from connectors.planning.layout import GroupKind
from connectors.protocol.agent_metadata import ModelIdentity
from connectors.store.settings import parse_settings
from connectors.vllm_hma.kv_store.orders import StoreOrders
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from connectors.vllm_hma.orders import Orders
from connectors.vllm_hma.reports import WorkerReport
from tests.campaigns.runner import Report
from tests.campaigns.schedules.core import STOP_TOKEN, Core, sample
from tests.planning.builders import Rank, Shape, make_engine, with_field
from tests.vllm_contract.caches import cache_config, connector_config, full, sliding, vllm_config

WINDOW_TOKENS, CHUNK, MAX_MODEL_LEN = 48, 32, 512
MAX_TOKENS_A_STEP, MAX_REQUESTS, MAX_PROMPT_TOKENS = 64, 12, 200
IMAGE_TOKEN, IMAGE_AT, IMAGE_TOKENS = 8, 25, 12
"""Images lie across the end of a chunk."""

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


class Engine(Core):
    """One engine core with ranks of real memory."""

    ends_within_steps, most_requests = 3000, 20

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
        # Often too few blocks and too little staging.
        store: dict[str, Any] = {"path": str(folder), "disk_gib": 400 / (1 << 18), "chunk_tokens": CHUNK}
        store |= {"staging_mib": 1, "lookup_s": 0.2, "load_s": 1.0, "always_load": True}
        config = vllm_config.__wrapped__(
            kv_transfer_config=connector_config("TandemStoreConnector", store=store),
            block_size=block_tokens,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_TOKENS_A_STEP,
            max_num_seqs=MAX_REQUESTS,
            enable_prefix_caching=prefixes,
            # States exist where steps end.
            long_prefill_token_threshold=CHUNK if states else 0,
        )
        window = sliding(sliding_window=WINDOW_TOKENS, block_size=block_tokens)
        state = MambaSpec(block_size=MAX_MODEL_LEN, shapes=((4,),), dtypes=(torch.float32,))
        specs: list[KVCacheSpec] = [full(block_size=block_tokens), window, state if states else window]
        cache = cache_config(*(([f"model.layers.{at}.self_attn.attn"], spec) for at, spec in enumerate(specs)))
        cache.num_blocks = blocks
        super().__init__(seed, config, cache, ahead, tp, 2 * IMAGE_TOKENS)
        sliding_group = (GroupKind.SLIDING, WINDOW_TOKENS, 1)
        last_group = (GroupKind.STATE, None, 1) if states else sliding_group
        groups = ((GroupKind.FULL, None, 1), sliding_group, last_group)
        style = self.rng.choice(["head_major", "token_major", "heads_outer"])
        shape = Shape(HEADS, style, block_tokens, 8, blocks, 0, True, groups, block_tokens)
        self.ranks: list[Rank] = make_engine(shape, tp)
        self.states = states
        settings = parse_settings({"store": store})
        self.workers = [StoreWorker(settings, MAX_MODEL_LEN, SpoiledSteps(1)) for _ in self.ranks]
        for worker, rank in zip(self.workers, self.ranks, strict=True):
            worker.register(with_field(rank.layout, 2, block_tokens=MAX_MODEL_LEN) if states else rank.layout)
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, number): worker.rank_cache(MODEL) for number, worker in enumerate(self.workers)}
        )
        self.tokens: dict[str, list[int]] = {}
        self.block_tokens = block_tokens

    def close(self) -> None:
        self.counts += Counter({f"store: {' '.join(key)}": round(count) for key, count in self.store.counts.items()})
        super().close()

    @property
    def store(self) -> Any:
        return self.connector.store.store

    # ---- requests -------------------------------------------------------------------------------

    def add(self, number: int) -> None:
        """Its prompt may share a prefix with others, of this engine or of an earlier one."""
        name, rng = f"r{number}", self.rng
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

    # ---- the engine's loop ----------------------------------------------------------------------

    def scheduled(self, output: SchedulerOutput) -> tuple[Any, ...]:
        """Return the block tables that the step was scheduled with."""
        if not output.num_scheduled_tokens:
            # Every request waits for the store's threads, so give them time.
            time.sleep(0.0005)
        manager = self.scheduler.kv_cache_manager
        return ({name: manager.get_block_ids(name) for name in output.num_scheduled_tokens},)

    def execute(self, output: SchedulerOutput, *given: Any) -> ModelRunnerOutput:
        orders, (tables,) = orders_of(output), given
        for load in orders.loads:
            self.counts["loads"] += 1
            self.counts["tokens loaded"] += load.end_token - load.start_token
        for worker in self.workers:
            worker.load(orders)
        sampled = self.forward(output, tables)
        reports = []
        for worker in self.workers:
            worker.store(orders)
            own = WorkerReport(store=worker.report())
            reports.append(KVConnectorOutput(invalid_block_ids=worker.not_loaded(), kv_connector_worker_meta=own))
        return self.merged(sampled, reports)

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
                sampled[name] = [sample(self.rng)]
                self.tokens[name] += sampled[name]
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

    # ---- the end --------------------------------------------------------------------------------

    def check_nothing_remains(self) -> None:
        super().check_nothing_remains()
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


def store_schedules(report: Report, *, steps: int = 48_000, seed: int = 1) -> None:
    """``steps`` of all engines together."""
    logging.disable(logging.WARNING)
    totals = run(report.folder / "store", seed, -(-steps // len(KINDS)), KINDS)
    report.row(**dict(sorted(totals.items())))
