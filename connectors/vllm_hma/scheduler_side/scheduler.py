"""Scheduler side of the connector: orders the workers to send and receive KV of requests.

    prefill  on_new_request -> Expect; each step -> Chunk; end -> Finished; ``finished_sending``
             frees the blocks
    decode   on_new_request -> Queue, if other requests wait for the same producer; after ``due``:
             ``matched_tokens`` claims tokens, ``after_alloc`` has the blocks -> Receive

Both requests of a transfer arrive at once, and prefill may compute other requests first. The
consumer allocates its blocks when the prompt is about to start, so a queued request holds no
blocks. Until then, ``matched_tokens`` returns None and vLLM skips the request. If no other request
waits for that producer, the consumer allocates at once: an idle prefill engine computes the first
chunk before an answer could arrive (docs/decisions/0032).

A consumer claims all prompt tokens but the last, which it computes itself to get logits. vLLM also
lets a connector claim all tokens and recompute the last one (vllm/v1/core/sched/scheduler.py,
``_update_waiting_for_remote_kv``). In that case, sliding-window groups have freed the oldest token
in the last token's window, and a state already includes the last token. The producer therefore
removes the last token from the prompt on arrival: its windows and states end where the consumer
resumes.

With ``first_token``, the producer computes the whole prompt and samples the answer's first token
(docs/decisions/0046). It sends the KV of whole blocks only. While they are sent, one more step
computes the remaining tokens; it writes to other blocks. It also moves the windows on, so the
scheduler side takes references to the blocks of the windows that the consumer needs. The consumer
computes the remaining tokens itself. The extra step would change a state that is being sent, so
producers of models with states sample no first tokens (``first_token_multiple`` is 0).
"""

from __future__ import annotations

import ipaddress
import logging
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from connectors.errors import WireError
from connectors.planning.blocks import first_needed_token
from connectors.planning.layout import WINDOWED, Group, GroupKind
from connectors.protocol.actions import Due
from connectors.protocol.agent_metadata import decode_agent_metadata, engine_metadata
from connectors.protocol.params import (
    ConsumeParams,
    DiscardParams,
    EngineAddress,
    LostParams,
    ProduceParams,
    parse_params,
    prompt_digest,
    whole_blocks,
)
from connectors.vllm_hma.config import ConnectorConfig
from connectors.vllm_hma.handshake.metadata_process import MetadataProcess
from connectors.vllm_hma.metrics import TandemStats
from connectors.vllm_hma.model.identity import Adapters
from connectors.vllm_hma.model.media import divides_image
from connectors.vllm_hma.orders import Chunk, EncodedAgentMetadata, Expect, Finished, Orders, Queue, Receive, Release
from connectors.vllm_hma.rate_limited_log import RateLimitedLog
from connectors.vllm_hma.scheduler_side.blocks import Blocks
from connectors.vllm_hma.scheduler_side.failed_loads import FailedLoads
from connectors.vllm_hma.scheduler_side.quarantine import Quarantine
from connectors.vllm_hma.scheduler_side.shared_transfers import SharedTransfers
from connectors.vllm_hma.upstream.vllm_request_prompt import (
    drop_last_token,
    hide_last_tokens,
    sample_last_token,
    send_whole_prompt,
    show_last_tokens,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Production:
    """A prefill request whose KV this engine sends.

    ``prompt_tokens``  tokens that this engine computes for the consumer
    ``sent``           number of block ids that the workers have, by group
    ``starting``       whether the workers have its ``starts`` order: its prompt is about to start
    ``request``        the request whose last tokens are computed in one more step, for the answer's
                       first token; None without ``first_token``
    ``windows``        references to the blocks of windows that the step for the first token frees
    """

    transfer_id: str
    prompt_tokens: int
    sent: list[int]
    starting: bool = False
    request: Request | None = None
    windows: list[KVCacheBlock] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProductionSnapshot:
    """Copy of a prefill request's state; fields as in ``_Production``."""

    prompt_tokens: int
    sent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """Copy of the scheduler side's state.

    ``productions``        prefill requests with a transfer
    ``consumptions``       decode requests whose transfer has not started
    ``queued``             consumptions whose prompt has not started
    ``receptions``         decode requests whose transfer is in progress
    ``followers``          decode requests that share another request's transfer
    ``has_orders``         whether orders for the next step are pending
    ``side_channel_port``  port of the side channel; None before ``publish``
    """

    productions: Mapping[str, ProductionSnapshot]
    consumptions: frozenset[str]
    queued: frozenset[str]
    receptions: frozenset[str]
    followers: frozenset[str]
    has_orders: bool
    side_channel_port: int | None


class SchedulerConnector:
    """Scheduler side of one engine, in the engine core's process."""

    def __init__(
        self,
        config: ConnectorConfig,
        incarnation: str,
        tp_size: int,
        groups: tuple[Group, ...],
        step_tokens: int,
        drafts_read_next_token: bool = False,
        speculates: bool = False,
        lookahead_tokens: int = 0,
        whole_images: bool = False,
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._tp_size = tp_size
        self._groups = groups
        self._step_tokens = step_tokens
        self._first_token_multiple = 0 if speculates else first_token_multiple(groups)
        self._drafts_read_next_token = drafts_read_next_token
        self._whole_images = whole_images
        self._orders = Orders()
        self._productions: dict[str, _Production] = {}
        # Remaining prompt tokens of prefill requests, in order of arrival.
        self._tokens_left: dict[str, int] = {}
        self._consumptions: dict[str, ConsumeParams] = {}
        self._queued: set[str] = set()
        # Request and producer's incarnation of each transfer in progress, by request id.
        self._taken: dict[str, tuple[Request, str]] = {}
        # Requests that have received their KV and have not run since.
        self._received: set[str] = set()
        self._shared = SharedTransfers()
        self._adapters = Adapters()
        self.blocks = Blocks(lookahead_tokens)
        self.quarantine = Quarantine(self.blocks)
        self._failed = FailedLoads(self.blocks, self.quarantine)
        self._stats = TandemStats()
        self._server: MetadataProcess | None = None
        self._warn = RateLimitedLog(logger)

    # Start and end.

    def publish(self, rank_metadata: dict[tuple[int, int], EncodedAgentMetadata]) -> None:
        """Start the side channel, after all workers have registered their memory."""
        workers = {tp_rank: decode_agent_metadata(meta.agent_metadata) for (_, tp_rank), meta in rank_metadata.items()}
        engine_metadata(workers)
        encoded = [rank_metadata[key].agent_metadata for key in sorted(rank_metadata)]
        self._server = MetadataProcess(
            self._config.side_channel_host, self._config.side_channel_port, encoded, self._config.keys.identity
        )
        if not self._config.keys.identity and not _loopback(self._config.side_channel_host):
            logger.warning(
                "Tandem: no secret is set, so every client that can connect to %s can write to this engine's memory; "
                "set transfer.secret (kv_connector_extra_config: secret)",
                self._config.side_channel_host,
            )
        logger.info(
            "Tandem: engine %s serves its agent metadata on %s:%d",
            self._incarnation,
            self._config.side_channel_host,
            self._server.port,
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    # Requests.

    def new_request(self, request: Request) -> None:
        """Handle a new request.

        Invalid kv_transfer_params do not fail the request: this engine computes its prompt.
        """
        try:
            params = parse_params(request.kv_transfer_params)
        except WireError as error:
            # The request itself is valid: this engine computes its prompt.
            logger.warning("request %s: %s; this engine computes its prompt", request.request_id, error)
            # vLLM also reads the parameters and expects a dict (vllm/v1/core/sched/scheduler.py).
            request.kv_transfer_params = None
            return
        if isinstance(params, DiscardParams):
            self._orders.discards.append(params.transfer_id)
            return
        if isinstance(params, LostParams):
            if self._config.believes(params.supervisor):
                self._orders.lost.append(params.engines)
            else:
                self._warn(
                    "supervisor",
                    f"ignored the report of request {request.request_id[:80]!r} that engines "
                    f"{params.engines[:80]!r} have ended: its supervisor token is wrong",
                )
            return
        if params is not None and request.prompt_embeds is not None:
            # No digest covers prompt embeddings, so the two requests could not be compared.
            logger.warning("request %s has prompt embeddings, so this engine computes its prompt", request.request_id)
            return
        if isinstance(params, ProduceParams) and not params.describe:
            if request.max_tokens != 1:
                # Decoding would move the windows, and vLLM would free blocks that the consumer
                # needs.
                logger.warning(
                    "the KV of request %s is not sent: a prefill leg must set max_tokens=1, not %d",
                    request.request_id,
                    request.max_tokens,
                )
                return
            if params.first_token and not self._first_token_multiple:
                logger.warning(
                    "the KV of request %s is not sent: the request asks for its first token, but the step for it would "
                    "change the states of this model while they are sent, or this engine speculates",
                    request.request_id,
                )
                return
            tokens = request.num_prompt_tokens - 1
            if params.first_token:
                tokens = whole_blocks(request.num_prompt_tokens, self._first_token_multiple)
            if self._divides_image(request, tokens):
                logger.warning(
                    "the KV of request %s is not sent: it would end within an image, whose tokens this model reads "
                    "together",
                    request.request_id,
                )
                return
            digest = _digest(request, self._adapters)
            if not params.first_token:
                if self._drafts_read_next_token:
                    sample_last_token(request)
                drop_last_token(request)
                tokens = request.num_prompt_tokens
            # The consumer needs no KV of a prompt without a whole block.
            production = _Production(
                params.transfer_id or uuid.uuid4().hex, tokens or request.num_prompt_tokens, [0] * len(self._groups)
            )
            if params.first_token and tokens:
                production.request = request
                hide_last_tokens(request, tokens)
            self._productions[request.request_id] = production
            self._tokens_left[request.request_id] = production.prompt_tokens
            self._orders.expects.append(
                Expect(request.request_id, production.transfer_id, production.prompt_tokens, digest)
            )
        elif isinstance(params, ConsumeParams):
            if not self._shared.join(params.transfer_id, request.request_id):
                return
            if self._divides_image(request, _end_token(request, params)):
                # The producer makes the same check and sends no KV.
                self._stats.count("requests", "recomputed")
                self._orders.releases.append(Release(params.transfer_id, params.producer))
                return
            others_wait = self._waits_for(params.producer.incarnation)
            self._consumptions[request.request_id] = params
            if others_wait and not params.computed:
                self._queued.add(request.request_id)
                self._orders.queues.append(Queue(request.request_id, params.transfer_id, params.producer))

    def awaits_prefix(self, request_id: str) -> bool:
        """Return whether the request waits until another one has received their common prompt.

        The deadlines of the other request's transfer bound the wait.
        """
        receiver = self._shared.receiver_of(request_id)
        return receiver is not None and (
            receiver in self._consumptions or receiver in self._taken or receiver in self._failed
        )

    def _divides_image(self, request: Request, token: int) -> bool:
        """Return whether a producer that stops at ``token`` would compute wrong KV for an image."""
        return self._whole_images and divides_image(request, token)

    def _waits_for(self, incarnation: str) -> bool:
        """Return whether a request, with blocks or without, waits for KV from this producer."""
        waiting = any(params.producer.incarnation == incarnation for params in self._consumptions.values())
        return waiting or any(incarnation == other for _, other in self._taken.values())

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return the number of tokens after ``computed_tokens`` to receive; None while queued.

        No side effects: vLLM may call it repeatedly.
        """
        if request.request_id not in self._consumptions:
            return 0
        params = self._consumptions[request.request_id]
        tokens = max(0, _end_token(request, params) - computed_tokens)
        return None if tokens and request.request_id in self._queued else tokens

    def end_token(self, request: Request) -> int:
        """Return the first prompt token that a request with a transfer computes itself."""
        return _end_token(request, self._consumptions[request.request_id])

    def due(self, reported: Iterable[Due]) -> None:
        """Release queued requests: they allocate blocks, or compute prompts after a failure."""
        for due in reported:
            params = self._consumptions.get(due.request_id)
            # A later request may have the same id.
            if params is None or params.transfer_id != due.transfer_id or due.request_id not in self._queued:
                continue
            self._queued.discard(due.request_id)
            if due.failure is not None:
                del self._consumptions[due.request_id]
                self._stats.count("requests", "recomputed")

    def consumes(self, request_id: str) -> bool:
        """Return whether the request has a transfer that has not started."""
        return request_id in self._consumptions

    def receives(self, request_id: str) -> bool:
        """Return whether the transfer of this request is in progress."""
        return request_id in self._taken

    def after_alloc(
        self, request: Request, tables: tuple[list[int], ...], external_tokens: int, loaded_token: int = 0
    ) -> Receive | None:
        """Start the request's transfer, if it needs one, after vLLM has allocated its blocks.

        Return the order for the workers; None without a transfer.

        ``loaded_token``  token before which the KV store supplies full attention

        vLLM may call this twice.
        """
        params = self._consumptions.pop(request.request_id, None)
        if params is None:
            return None
        self._queued.discard(request.request_id)
        if external_tokens == 0:
            self._orders.releases.append(Release(params.transfer_id, params.producer))
            return None
        end_token = _end_token(request, params)
        self._taken[request.request_id] = request, params.producer.incarnation
        receive = Receive(
            request_id=request.request_id,
            transfer_id=params.transfer_id,
            producer=params.producer,
            prompt_digest=_digest(request, self._adapters),
            tables=tuple(tuple(table) for table in tables),
            start_token=end_token - external_tokens,
            end_token=end_token,
            loaded_token=loaded_token,
        )
        first = max(receive.start_token, loaded_token)
        sources = {
            "own_cache": receive.start_token,
            "store": first - receive.start_token,
            "transfer": end_token - first,
        }
        for source, tokens in sources.items():
            if tokens:
                self._stats.count("prompt_tokens", source, tokens)
        self._orders.receives.append(receive)
        return receive

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request.

        Return whether its blocks stay allocated until ``finished_sending``, and the
        kv_transfer_params of the response.
        """
        request_id = request.request_id
        self._failed.left(request_id)
        self._received.discard(request_id)
        self._tokens_left.pop(request_id, None)
        self._queued.discard(request_id)
        self._shared.left(request_id)
        params = self._consumptions.pop(request_id, None)
        if params is not None:
            self._orders.releases.append(Release(params.transfer_id, params.producer))
        if request_id in self._taken:
            del self._taken[request_id]
            self._orders.aborts.append(request_id)
        if request_id not in self._productions:
            return False, self._describe(request)
        production = self._productions[request_id]
        complete = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        complete = complete and request.num_computed_tokens >= production.prompt_tokens
        reason = "" if complete else f"the prefill request ended as {request.status.name.lower()}"
        self._orders.finished.append(Finished(request_id, complete, reason))
        if not complete:
            self._end_production(request_id)
            return False, None
        address = self._address()
        return True, {
            **address,
            "transfer_id": production.transfer_id,
            "remote_request_id": request_id,
            "remote_num_tokens": production.prompt_tokens,
        }

    def sending_finished(self, request_ids: set[str]) -> None:
        """Handle requests whose KV all workers have sent: vLLM frees their blocks now."""
        for request_id in request_ids & self._productions.keys():
            self._end_production(request_id)
            self._stats.count("requests", "sent")

    def _end_production(self, request_id: str) -> None:
        self.blocks.drop(self._productions.pop(request_id).windows)

    def receiving_finished(self, request_ids: set[str], failed: set[str]) -> set[str]:
        """Handle requests whose transfers have ended on all workers, and return those to resume.

        ``failed``  requests whose transfer failed

        A request whose transfer failed resumes in this or a later call (``failed_loads.py``).
        """
        resumed = set(request_ids)
        for request_id in request_ids & self._taken.keys():
            request, _ = self._taken.pop(request_id)
            if request_id in failed:
                self._stats.count("requests", "recomputed")
                self._failed.add(request)
                resumed.discard(request_id)
            else:
                self._stats.count("requests", "received")
                self._received.add(request_id)
        return resumed | self._failed.take_fitting(self._taken.keys() | self._received)

    def stats(self) -> TandemStats | None:
        """Return the counts since the last call; None if there were none."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, TandemStats()
        return taken

    def snapshot(self) -> SchedulerSnapshot:
        """Return a copy of the state, for tests and diagnosis."""
        return SchedulerSnapshot(
            productions={
                request_id: ProductionSnapshot(each.prompt_tokens, tuple(each.sent))
                for request_id, each in self._productions.items()
            },
            consumptions=frozenset(self._consumptions),
            queued=frozenset(self._queued),
            receptions=frozenset(self._taken),
            followers=self._shared.followers,
            has_orders=self._orders != Orders(),
            side_channel_port=None if self._server is None else self._server.port,
        )

    # Steps.

    def orders(self, output: SchedulerOutput) -> Orders:
        """Return the workers' orders for this step."""
        orders, self._orders = self._orders, Orders()
        orders.report = bool(self.quarantine) or bool(self._failed)
        self._received -= output.num_scheduled_tokens.keys()
        for request_id in output.preempted_req_ids or ():
            production = self._productions.get(request_id)
            if production is not None:
                self.blocks.drop(production.windows)
                production.windows = []
                production.sent = [0] * len(self._groups)
                self._tokens_left[request_id] = production.prompt_tokens
                orders.preempted.append(request_id)
                if production.request is not None:
                    hide_last_tokens(production.request, production.prompt_tokens)
        for new in output.scheduled_new_reqs:
            production = self._productions.get(new.req_id)
            if production is not None and production.request is not None:
                send_whole_prompt(new)
        for request_id, computed_before in _scheduled(output):
            production = self._productions.get(request_id)
            if production is not None and computed_before < production.prompt_tokens:
                self._start(request_id, orders)
                orders.chunks.append(self._chunk(request_id, production, computed_before, output))
        self._start_next(orders)
        return orders

    def _start_next(self, orders: Orders) -> None:
        """Announce prompts that the next step can reach, if vLLM computes them in arrival order."""
        ahead = 0
        for request_id, tokens in self._tokens_left.items():
            if ahead >= self._step_tokens:
                break
            self._start(request_id, orders)
            ahead += tokens

    def _start(self, request_id: str, orders: Orders) -> None:
        production = self._productions[request_id]
        if not production.starting:
            production.starting = True
            orders.starts.append(request_id)

    def _chunk(self, request_id: str, production: _Production, computed_before: int, output: SchedulerOutput) -> Chunk:
        assert output.kv_connector_block_state is not None
        tables = output.kv_connector_block_state.get_block_ids(request_id)
        assert tables is not None, "a scheduled request has a block table"
        new_ids = tuple(tuple(table[sent:]) for table, sent in zip(tables, production.sent, strict=True))
        production.sent = [len(table) for table in tables]
        computed = min(computed_before + output.num_scheduled_tokens[request_id], production.prompt_tokens)
        self._tokens_left[request_id] = production.prompt_tokens - computed
        if not self._tokens_left[request_id]:
            del self._tokens_left[request_id]
            if production.request is not None:
                production.windows = self.blocks.take(request_id, self._windows_at(computed))
                show_last_tokens(production.request)
        return Chunk(request_id, new_ids, computed, computed == production.prompt_tokens)

    def _windows_at(self, token: int) -> list[slice]:
        """Return the part of each group's block table that holds its window at ``token``."""
        return [
            slice(first_needed_token(group, token) // group.block_tokens, token // group.block_tokens)
            if group.kind in WINDOWED
            else slice(0)
            for group in self._groups
        ]

    def _describe(self, request: Request) -> dict[str, Any] | None:
        """Return this engine's address for a request with ``describe``; else None."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode") and params.get("describe"):
            return self._address() | {"first_token_multiple": self._first_token_multiple}
        return None

    def _address(self) -> dict[str, Any]:
        assert self._server is not None, "the side channel is open before the first request"
        address = EngineAddress(self._incarnation, self._config.reachable_host, self._server.port)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": address.incarnation,
            "remote_host": address.host,
            "remote_port": address.port,
            "tp_size": self._tp_size,
        }


def first_token_multiple(groups: Sequence[Group]) -> int:
    """Return the granularity, in tokens, of the KV sent by a producer that samples first tokens.

    0 if a group holds states: such a producer cannot sample first tokens.
    """
    if any(group.kind is GroupKind.STATE for group in groups):
        return 0
    return math.lcm(*(group.block_tokens for group in groups))


def _end_token(request: Request, params: ConsumeParams) -> int:
    """Return the first token of the prompt that the consumer computes itself."""
    if params.prompt_multiple:
        return whole_blocks(request.num_prompt_tokens, params.prompt_multiple)
    return request.num_prompt_tokens - 1


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _digest(request: Request, adapters: Adapters) -> str:
    """Return the prompt digest, which must be equal on both requests of a transfer."""
    others = [f"{f.identifier}@{f.mm_position.offset}+{f.mm_position.length}" for f in request.mm_features]
    if request.lora_request is not None:
        others.append(f"adapter {adapters.identity(request.lora_request)}")
    if request.cache_salt is not None:
        others.append(request.cache_salt)
    return prompt_digest(request.prompt_token_ids, others)


def _scheduled(output: SchedulerOutput) -> list[tuple[str, int]]:
    """Return (request id, tokens computed before this step) of all requests in this step."""
    cached = output.scheduled_cached_reqs
    return [
        *((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs),
        *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
    ]
