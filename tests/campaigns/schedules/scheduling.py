"""vLLM's own scheduler with the connector's scheduler side, driven at random, with modelled
workers.

They report as real workers do: tokens for the requests that a step completes; ``finished_sending``
once for a held production; ``finished_recving`` once for a reception, sometimes failed, and
sometimes with a foreign rank that may write to its blocks for a while after that; and ``Due`` once
for a queued request, sometimes failed, from the first rank. They check each step's orders.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from app.demo.paths import MODEL_DIR
from connectors.codec import encode_agent_metadata
from connectors.protocol.actions import Due
from connectors.protocol.agent_metadata import AgentMetadata
from connectors.protocol.params import EMITTED_TOKENS
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.orders import Chunk, EncodedAgentMetadata, Orders
from connectors.vllm_hma.reports import Kept, WorkerReport
from connectors.vllm_hma.upstream.vllm_emitted_tokens import emitted_tokens
from testing.connector_state import snapshot
from tests.campaigns.runner import Report
from tests.campaigns.schedules.core import STOP_TOKEN, Core, sample
from tests.vllm_contract.caches import cache_config, connector_config, full, sliding, vllm_config
from tests.vllm_contract.workers import IDENTITY, layout_of

TP, BLOCK_TOKENS, WINDOW_TOKENS = 2, 16, 48
MAX_TOKENS_A_STEP, MAX_REQUESTS, MAX_PROMPT_TOKENS = 32, 12, 200
IMAGE_TOKEN, IMAGES, MOST_IMAGE_TOKENS = 8, 12, 24
ENCODER_TOKENS = 2 * MOST_IMAGE_TOKENS
"""Capacity of the encoder's cache, and its tokens per step."""

SUPERVISOR = "the engine's supervisor"

KINDS = [(blocks, prefixes, ahead) for blocks in (32, 60) for prefixes in (True, False) for ahead in (True, False)]
"""Engines: blocks in the pool, prefix caching, asynchronous scheduling."""


@dataclass
class Rank:
    """Pending reports of one rank: the step at which it reports each request.

    ``fills``: transfer id and blocks of a reception; ``quarantine``: step of their end, and blocks
    that may be written; ``late``: failed receptions for the next step's report. ``queued``: step at
    which a transfer's prompt starts.
    """

    sends: dict[str, int] = field(default_factory=dict)
    receives: dict[str, int] = field(default_factory=dict)
    produces: dict[str, list[list[int]]] = field(default_factory=dict)
    fills: dict[str, tuple[str, set[int]]] = field(default_factory=dict)
    quarantine: dict[Kept, tuple[int, set[int]]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    queued: dict[str, tuple[int, str]] = field(default_factory=dict)


class Engine(Core):
    """One engine core, with ranks that report as real workers do."""

    connector: TandemConnector
    moves = True
    """Whether running requests sometimes move."""

    def __init__(
        self,
        seed: int,
        blocks: int = 60,
        prefix_caching: bool = True,
        asynchronous: bool = True,
        drafts: int = 0,
        images: bool = False,
        role: str = "kv_both",
    ) -> None:
        config = engine_config(prefix_caching, drafts, role)
        super().__init__(seed, config, kv_cache(blocks), asynchronous, TP, ENCODER_TOKENS if images else 0)
        self.drafts, self.images = drafts, images
        agent_metadata = encode_agent_metadata(AgentMetadata("me", IDENTITY, layout_of(1 << 20), "memory", b""))
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): EncodedAgentMetadata(agent_metadata)})
        self.started: set[str] = set()
        self.ranks: list[Rank] = [Rank() for _ in range(TP)]
        self.known_tokens: dict[str, int] = {}
        # Blocks that a consumer may fetch, by request id and group.
        self.sends: dict[str, list[list[int]]] = {}

    # ---- requests -------------------------------------------------------------------------------

    def add(self, number: int) -> None:
        """Add a request of some kind; its prompt may share a prefix with others."""
        rng = self.rng
        shared = rng.choice([0, 0, 40, 120])
        length = rng.choice([1, 2, rng.randint(3, 40), rng.randint(3, 40), rng.randint(40, MAX_PROMPT_TOKENS)])
        prompt = ([9] * shared + [rng.randint(10, 500) for _ in range(MAX_PROMPT_TOKENS)])[:length]
        kind, params, max_tokens = self.kind(number)
        self.counts[kind] += 1
        emitted = [rng.randint(10, 500) for _ in range(rng.randint(1, 40))] if kind == "moved here" else []
        extra = {"kv_transfer_params": params, EMITTED_TOKENS: emitted}
        sampling = SamplingParams(max_tokens=max_tokens + len(emitted), extra_args=extra)
        sampling.stop_token_ids = [STOP_TOKEN]
        features = self.add_images(prompt) if self.images else None
        choices = self.rng.choice([1, 1, 2, 4]) if kind == "consumed" else 1
        self.counts["choices after the first"] += choices - 1
        for choice in range(choices):
            name = f"{choice}_r{number}" if choices > 1 else f"r{number}"
            request = Request(name, prompt, sampling, None, mm_features=features, block_hasher=self.hasher)
            self.scheduler.add_request(request)

    def add_images(self, prompt: list[int]) -> list[MultiModalFeatureSpec]:
        """Replace parts of the prompt with up to three images; return their positions."""
        features, start = [], 0
        for _ in range(self.rng.randint(0, 3)):
            image = self.rng.randrange(IMAGES)
            # The size of an image is a part of its content.
            length = 1 + image * 7 % MOST_IMAGE_TOKENS
            offset = start + self.rng.randint(0, 20)
            start = offset + length
            if start > len(prompt):
                break
            prompt[offset:start] = [IMAGE_TOKEN] * length
            features.append(MultiModalFeatureSpec(None, "image", f"image {image}", PlaceholderRange(offset, length)))
        self.counts["images"] += len(features)
        return features

    def kind(self, number: int) -> tuple[str, Any, int]:
        rng = self.rng
        transfer_id = f"t{number if rng.random() < 0.9 else rng.randint(0, number)}"
        engine = {"remote_engine_id": "other", "remote_host": "127.0.0.1", "remote_port": 9}
        consume = {"do_remote_prefill": True, "transfer_id": transfer_id} | engine
        computed = consume | {"remote_num_tokens": 9}
        produce = {"do_remote_decode": True, "transfer_id": transfer_id}
        several = rng.randint(1, 12)
        kinds: list[tuple[str, Any, int]] = [
            ("plain", None, 120),
            ("plain", None, several),
            ("produced", produce, 1),
            ("produced without an id", {"do_remote_decode": True}, 1),
            ("produced with its first token", produce | {"first_token": True}, 1),
            ("produced", produce, 1),
            ("consumed", consume, several),
            ("consumed", consume, several),
            ("consumed after prefill", computed, several),
            ("moved here", computed | {"moved": True}, several),
            ("discard", produce | {"discard": True}, 1),
            ("describe", {"do_remote_decode": True, "describe": True}, 1),
            (
                "bad",
                rng.choice([produce | consume, {"do_remote_prefill": True}, consume | {"remote_port": "9"}]),
                several,
            ),
            (
                "bad",
                rng.choice([{}, {"unknown": 1}, produce | {"transfer_id": ""}, consume | {"transfer_id": 5}]),
                several,
            ),
            ("bad", produce, several + 1),
        ]
        return rng.choice(kinds)

    def abort(self, *others: str) -> str | None:
        """Also abort ended requests that wait to be sent, and often those that wait for KV."""
        ours = snapshot(self.connector.scheduler)
        receptions, queued, followers = sorted(ours.receptions), sorted(ours.queued), sorted(ours.followers)
        name = super().abort(*others, *ours.productions, *receptions * 3, *queued * 2, *followers * 2)
        for what in ("productions", "receptions", "queued", "followers"):
            self.counts[f"aborted {what}"] += name in getattr(ours, what)
        return name

    def move(self, request_id: str) -> None:
        """Tell a running request to move, as vLLM passes on a rejected request."""
        params = {"do_remote_decode": True, "move": request_id, "transfer_id": f"moved {request_id}"}
        extra = {"kv_transfer_params": params | {"supervisor": SUPERVISOR}}
        name = f"move {self.steps}"
        self.scheduler.add_request(Request(name, [0], SamplingParams(max_tokens=1, extra_args=extra), None))
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # ---- the engine's loop ----------------------------------------------------------------------

    def scheduled(self, output: SchedulerOutput) -> tuple[Any, ...]:
        assert isinstance(output.kv_connector_metadata, Orders)
        self.counts["preempted productions"] += len(output.kv_connector_metadata.preempted)
        self.check_tables(output)
        self.check_sends(output)
        self.check_encoder(output)
        self.check_queued()
        self.check_quarantine()
        return ()

    def updated(self, result: ModelRunnerOutput) -> None:
        self.check_sends()
        if self.drafts and not self.asynchronous:
            # With asynchronous scheduling, the scheduler schedules placeholders.
            proposed = [[self.rng.randint(10, 500)] * self.rng.randint(0, self.drafts) for _ in result.req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(result.req_ids, proposed))

    def check_tables(self, output: SchedulerOutput) -> None:
        """Check, chunk by chunk, that the workers receive the scheduler's current block tables."""
        orders = output.kv_connector_metadata
        assert isinstance(orders, Orders)
        for chunk in orders.chunks:
            if chunk.request_id in (request := self.moved(orders)):
                self.check_moved(request[chunk.request_id], chunk)
                continue
            assert output.num_scheduled_tokens[chunk.request_id] > 0
            production = snapshot(self.connector.scheduler).productions[chunk.request_id]
            table = self.scheduler.kv_cache_manager.get_block_ids(chunk.request_id)
            assert production.sent == tuple(len(ids) for ids in table)
            for ids, new in zip(table, chunk.new_ids, strict=True):
                assert not new or tuple(ids[-len(new) :]) == new
            assert -(-chunk.computed_tokens // BLOCK_TOKENS) <= min(map(len, table))
            assert chunk.last == (chunk.computed_tokens == production.prompt_tokens)

    def moved(self, orders: Orders) -> dict[str, Request]:
        """Return the requests that have moved with the last output."""
        expected = {each.request_id for each in orders.expects}
        ended = expected & {each.request_id for each in orders.finished if each.held}
        return {request_id: self.scheduler.requests[request_id] for request_id in ended}

    def check_moved(self, request: Request, chunk: Chunk) -> None:
        """All tokens but the last have KV, in blocks that nobody else may take; no step runs."""
        assert chunk.computed_tokens == request.num_tokens - 1 == request.num_computed_tokens
        assert request.num_in_flight_tokens == request.num_output_placeholders == 0
        window = max(0, chunk.computed_tokens - WINDOW_TOKENS + 1) // BLOCK_TOKENS
        stop = -(-chunk.computed_tokens // BLOCK_TOKENS)
        for first, table in zip((0, window, window), chunk.new_ids, strict=True):
            assert all(self.pool.blocks[block].ref_cnt > 0 for block in table[first:stop])
            assert 0 not in table[first:stop]
            assert len(table) == stop
        self.counts["moved"] += 1

    def check_sends(self, output: SchedulerOutput | None = None) -> None:
        """Blocks that a consumer may fetch are not free from the last chunk to the end of the
        transfer. ``output``: the step that has just been scheduled.
        """
        if output is not None:
            orders = output.kv_connector_metadata
            assert isinstance(orders, Orders)
            for request_id in orders.preempted:
                self.sends.pop(request_id, None)
            for chunk in orders.chunks:
                if chunk.last:
                    tables = self.scheduler.kv_cache_manager.get_block_ids(chunk.request_id)
                    window = max(0, chunk.computed_tokens - WINDOW_TOKENS + 1) // BLOCK_TOKENS
                    stop = -(-chunk.computed_tokens // BLOCK_TOKENS)
                    self.sends[chunk.request_id] = [tables[0][:stop], *(table[window:stop] for table in tables[1:])]
        productions = snapshot(self.connector.scheduler).productions
        for request_id, tables in list(self.sends.items()):
            if request_id not in productions:
                del self.sends[request_id]
                continue
            request = self.scheduler.requests[request_id]
            if request.status == RequestStatus.PREEMPTED:
                continue
            for block in (block for table in tables for block in table):
                assert block != 0
                assert self.pool.blocks[block].ref_cnt > 0, f"a block of {request_id} is free"

    def check_encoder(self, output: SchedulerOutput) -> None:
        """Check that the encoder runs for no image whose KV has arrived or is cached."""
        for request_id, inputs in output.scheduled_encoder_inputs.items():
            request = self.scheduler.requests[request_id]
            computed = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
            for index in inputs:
                position = request.mm_features[index].mm_position
                assert computed < position.offset + position.length, f"{request_id} has the KV of image {index}"
            self.counts["encoded"] += len(inputs)

    def check_queued(self) -> None:
        """A request whose prompt has not started on the other engine has no blocks."""
        for request_id in snapshot(self.connector.scheduler).queued:
            if request_id in self.scheduler.requests:
                assert not any(self.scheduler.kv_cache_manager.get_block_ids(request_id)), f"{request_id} has blocks"

    def check_quarantine(self) -> None:
        """Blocks that a foreign rank may write to are not free, and in no table but their
        request's until it resumes.
        """
        kept = {block for rank in self.ranks for _, blocks in rank.quarantine.values() for block in blocks}
        theirs = {each.request_id for rank in self.ranks for each in rank.quarantine}
        for request in self.scheduler.requests.values():
            if request.request_id in theirs and request.status != RequestStatus.RUNNING:
                continue
            for table in self.scheduler.kv_cache_manager.get_block_ids(request.request_id):
                assert not kept.intersection(table), f"{request.request_id} has blocks that are in quarantine"
        assert all(self.pool.blocks[block].ref_cnt > 0 for block in kept), "blocks in quarantine are free"

    def execute(self, output: SchedulerOutput, *given: Any) -> ModelRunnerOutput:
        reports = [self.rank_step(rank, output.kv_connector_metadata) for rank in self.ranks]
        return self.merged(self.sample(output), reports)

    def sample(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Return a token, and accepted drafts, for each request whose tokens this step
        completes.
        """
        cached = output.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            emitted = len(emitted_tokens(new.sampling_params))
            self.known_tokens[new.req_id] = len(new.prompt_token_ids) + emitted
        for request_id, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            request = self.scheduler.requests.get(request_id)
            if request_id in cached.resumed_req_ids and request is not None:
                self.known_tokens[request_id] = request.num_prompt_tokens + outputs
        tokens: dict[str, list[int]] = {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tokens[request_id] = []
            if before[request_id] + scheduled >= self.known_tokens[request_id]:
                drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                # Drafts of a request that has just come are placeholders.
                fresh = request_id not in cached.req_ids or request_id in cached.resumed_req_ids
                accepted = 0 if fresh else self.rng.randint(0, drafts)
                self.counts["placeholders"] += drafts if fresh else 0
                self.counts["accepted drafts"] += accepted
                self.counts["rejected drafts"] += drafts - accepted
                self.known_tokens[request_id] += 1 + accepted
                tokens[request_id] = [sample(self.rng) for _ in range(1 + accepted)]
        return tokens

    def rank_step(self, rank: Rank, orders: Any) -> KVConnectorOutput:
        """Carry out orders like a worker, and report what has ended by this step."""
        assert isinstance(orders, Orders)
        for expect in orders.expects:
            assert expect.request_id not in rank.produces, "expected twice"
            rank.produces[expect.request_id] = [[] for _ in range(3)]
        if rank is self.ranks[0]:
            for request_id in orders.starts:
                assert request_id not in self.started, "started twice"
                self.started.add(request_id)
            computed = {chunk.request_id for chunk in orders.chunks} - {each.request_id for each in orders.expects}
            assert computed <= self.started, "computed before its start was reported"
            for queue in orders.queues:
                rank.queued[queue.request_id] = self.later(), queue.transfer_id
        for request_id in orders.preempted:
            rank.produces[request_id] = [[] for _ in range(3)]
        for chunk in orders.chunks:
            for table, ids in zip(rank.produces[chunk.request_id], chunk.new_ids, strict=True):
                table.extend(ids)
            assert all(
                len(table) >= -(-chunk.computed_tokens // BLOCK_TOKENS) for table in rank.produces[chunk.request_id]
            )
        for finished in orders.finished:
            del rank.produces[finished.request_id]
            if finished.held:
                rank.sends[finished.request_id] = self.later()
        gone = {release.transfer_id for release in orders.releases}
        rank.queued = {request_id: item for request_id, item in rank.queued.items() if item[1] not in gone}
        for receive in orders.receives:
            assert receive.request_id not in rank.receives, "received twice"
            for given in receive.tables:
                assert -(-receive.end_token // BLOCK_TOKENS) <= len(given)
            rank.receives[receive.request_id] = self.later()
            first = -(-receive.start_token // BLOCK_TOKENS)
            blocks = {block for table in receive.tables for block in table[first:] if block}
            rank.fills[receive.request_id] = receive.transfer_id, blocks
        for request_id in orders.aborts:
            if request_id in rank.receives:
                rank.receives[request_id] = min(rank.receives[request_id], self.later(5))
        sent = {request_id for request_id, at in rank.sends.items() if at <= self.steps}
        received = {request_id for request_id, at in rank.receives.items() if at <= self.steps}
        failed = {request_id for request_id in received if self.rng.random() < 0.2}
        late, rank.late = rank.late, set()
        for request_id in sent:
            del rank.sends[request_id]
        due = [
            Due(request_id, transfer_id, "the weather" if self.rng.random() < 0.2 else None)
            for request_id, (at, transfer_id) in rank.queued.items()
            if at <= self.steps
        ]
        for each in due:
            del rank.queued[each.request_id]
        self.counts["due"] += len(due)
        report = WorkerReport(due=due, requested=orders.report)
        for request_id in sorted(received):
            del rank.receives[request_id]
            transfer_id, blocks = rank.fills.pop(request_id)
            if request_id in failed and self.rng.random() < 0.5:
                kept = Kept(request_id, transfer_id)
                report.begun.append(kept)
                rank.quarantine[kept] = self.later(300), blocks
                if self.rng.random() < 0.3:
                    # It has begun after this step's results were taken: its own end is in the next
                    # step.
                    received.remove(request_id)
                    failed.remove(request_id)
                    rank.late.add(request_id)
        report.ended = [kept for kept, (at, _) in rank.quarantine.items() if at <= self.steps]
        for kept in report.ended:
            del rank.quarantine[kept]
        self.counts["failed receptions"] += len(failed | late)
        self.counts["quarantines"] += len(report.begun)
        return KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received | late,
            failed_recving=failed | late,
            kv_connector_worker_meta=report or None,
        )

    def later(self, most: int = 40) -> int:
        return self.steps + self.rng.choice([0, 1, self.rng.randint(1, most)])

    # ---- a whole run ----------------------------------------------------------------------------

    def resets(self) -> float:
        productions = snapshot(self.connector.scheduler).productions
        return 0.1 if any(request.request_id in productions for request in self.scheduler.running) else 0.01

    def step(self) -> None:
        """Sometimes tell a running request to move first."""
        if self.moves and self.scheduler.running and self.rng.random() < 0.05:
            self.move(self.rng.choice(self.scheduler.running).request_id)
        super().step()

    def check_nothing_remains(self) -> None:
        super().check_nothing_remains()
        ours = self.connector.scheduler
        assert self.scheduler.get_request_counts() == (0, 0)
        left = snapshot(ours)
        remembered = [
            *left.productions,
            *left.consumptions,
            *left.queued,
            *left.receptions,
            *left.followers,
            *left.moves,
        ]
        assert not remembered, "the connector remembers requests"
        assert not ours.quarantine, "the connector keeps blocks"
        assert not left.has_orders, "orders were never given"
        assert self.ranks == [Rank() for _ in range(TP)], "a worker waits for an order"
        if self.images:
            encoder = self.scheduler.encoder_cache_manager
            assert encoder.num_freeable_slots == ENCODER_TOKENS, "the encoder's cache leaks"
            assert not any(encoder.cached.values()), "the encoder's cache remembers requests"


def engine_config(prefix_caching: bool, drafts: int = 0, role: str = "kv_both") -> VllmConfig:
    # The model is its own draft model: only the scheduler sees it.
    speculation = {"method": "draft_model", "model": str(MODEL_DIR), "num_speculative_tokens": drafts}
    return vllm_config.__wrapped__(
        kv_transfer_config=connector_config(role=role, supervisor=SUPERVISOR),
        block_size=BLOCK_TOKENS,
        max_model_len=512,
        max_num_batched_tokens=MAX_TOKENS_A_STEP,
        max_num_seqs=MAX_REQUESTS,
        enable_prefix_caching=prefix_caching,
        speculative_config=speculation if drafts else None,
    )


def kv_cache(blocks: int) -> KVCacheConfig:
    """A full-attention and two sliding-window groups, two layers each."""
    window = sliding(block_size=BLOCK_TOKENS, sliding_window=WINDOW_TOKENS)
    specs: list[KVCacheSpec] = [full(block_size=BLOCK_TOKENS), window, window]
    layers = [[f"model.layers.{2 * at + one}.self_attn.attn" for one in (0, 1)] for at in range(3)]
    cache = cache_config(*zip(layers, specs, strict=True))
    cache.num_blocks = blocks
    return cache


def schedules(report: Report, *, steps: int = 12_000, seed: int = 1) -> None:
    """This number of steps over engines of every kind, without and with drafts."""
    logging.disable(logging.WARNING)
    for drafts in (0, 3):
        totals = Counter[str]()
        for number, kind in enumerate(KINDS):
            with report.case(f"Engine({seed + number}, {kind}, drafts={drafts})"):
                engine = Engine(seed + number, *kind, drafts)
                try:
                    engine.run(-(-steps // len(KINDS)))
                finally:
                    engine.close()
                totals += engine.counts
        report.row(drafts=drafts, **dict(sorted(totals.items())))
