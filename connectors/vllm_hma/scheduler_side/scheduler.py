"""Scheduler side of the connector, over ``productions.py`` (prefill) and ``consumptions.py``
(decode).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connectors.codec import decode_agent_metadata
from connectors.errors import WireError
from connectors.planning.layout import Group
from connectors.protocol.agent_metadata import EngineMetadata, engine_identity, engine_metadata
from connectors.protocol.params import (
    ConsumeParams,
    DiscardParams,
    EngineAddress,
    LostParams,
    MoveParams,
    ProduceParams,
    parse_params,
)
from connectors.vllm_hma.config import ConnectorConfig
from connectors.vllm_hma.handshake.metadata_process import MetadataProcess
from connectors.vllm_hma.metrics import TandemStats
from connectors.vllm_hma.orders import EncodedAgentMetadata, Orders
from connectors.vllm_hma.scheduler_side.blocks import Blocks
from connectors.vllm_hma.scheduler_side.consumptions import Consumptions
from connectors.vllm_hma.scheduler_side.moves import Moves
from connectors.vllm_hma.scheduler_side.outbox import Outbox
from connectors.vllm_hma.scheduler_side.productions import Productions
from connectors.vllm_hma.scheduler_side.prompts import Prompts
from connectors.vllm_hma.scheduler_side.quarantine import Quarantine

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class SchedulerConnector:
    """Scheduler side of one engine, in the engine core's process.

    ``receives``  whether the engine's role is to receive KV. On other engines, vLLM's pool has
                  blocks to which a step in flight may still write (``defer_block_free`` in
                  vllm/v1/core/sched/scheduler.py)
    """

    config: ConnectorConfig
    incarnation: str
    tp_size: int
    groups: tuple[Group, ...]
    step_tokens: int
    drafts_read_next_token: bool = False
    speculates: bool = False
    lookahead_tokens: int = 0
    whole_images: bool = False
    receives: bool = True

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.lookahead_tokens)
        self.quarantine = Quarantine(self.blocks)
        self._outbox = Outbox()
        self._prompts = prompts = Prompts(self.whole_images)
        self.productions = Productions(
            self._outbox,
            self.blocks,
            prompts,
            self.groups,
            self.step_tokens,
            self.drafts_read_next_token,
            self.speculates,
        )
        self.consumptions = Consumptions(self._outbox, self.blocks, prompts, self.quarantine)
        self.moves = Moves(self._outbox, prompts)
        self.described: dict[str, Any] = {}
        """Further entries of the reply to ``describe``."""
        self._server: MetadataProcess | None = None

    # Start and end.

    def publish(self, rank_metadata: dict[tuple[int, int], EncodedAgentMetadata]) -> EngineMetadata:
        """Start the side channel, after all workers have registered; return the engine's metadata.

        ``rank_metadata`` is by (pipeline-parallel rank, TP rank). Raises WireError if the workers'
        metadata do not fit together, and as ``MetadataProcess``.
        """
        workers = {tp_rank: decode_agent_metadata(meta.agent_metadata) for (_, tp_rank), meta in rank_metadata.items()}
        engine = engine_metadata(workers)
        self.described["identity"] = engine_identity(engine, self.config.keys.identity)
        encoded = [rank_metadata[key].agent_metadata for key in sorted(rank_metadata)]
        self._server = MetadataProcess(
            self.config.side_channel_host, self.config.side_channel_port, encoded, self.config.keys.identity
        )
        if not self.config.keys.identity and not self.config.on_loopback:
            logger.warning(
                "Tandem: no secret is set, so every client that can connect to %s can write to this engine's memory; "
                "set transfer.secret (kv_connector_extra_config: secret)",
                self.config.side_channel_host,
            )
        logger.info(
            "Tandem: engine %s serves its agent metadata on %s:%d",
            self.incarnation,
            self.config.side_channel_host,
            self._server.port,
        )
        return engine

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    # Requests.

    def new_request(self, request: Request) -> None:
        """Invalid kv_transfer_params do not fail the request: this engine computes its prompt."""
        self.moves.new(request)
        try:
            params = parse_params(request.kv_transfer_params)
        except WireError as error:
            _not_transferred(request, str(error))
            # vLLM also reads the parameters and expects a dict (vllm/v1/core/sched/scheduler.py).
            request.kv_transfer_params = None
            return
        if isinstance(params, DiscardParams):
            self._outbox.orders.discards.append(params.transfer_id)
        elif isinstance(params, LostParams | MoveParams):
            self._supervise(request.request_id, params)
        elif params is not None and request.prompt_embeds is not None:
            # No digest covers prompt embeddings, so the two requests could not be compared.
            _not_transferred(request, "it has prompt embeddings")
        elif isinstance(params, ConsumeParams) and not self.receives:
            _not_transferred(request, "this engine's kv_role is kv_producer; set kv_consumer or kv_both")
        elif isinstance(params, ConsumeParams):
            self.consumptions.new(request, params)
        elif isinstance(params, ProduceParams) and not params.describe:
            self.productions.new(request, params)

    def _supervise(self, request_id: str, params: LostParams | MoveParams) -> None:
        if not self.config.believes(params.supervisor):
            logger.warning(
                "Tandem: ignored %s of request %.80s: it does not have this engine's supervisor token",
                type(params).__name__,
                request_id,
            )
        elif isinstance(params, MoveParams):
            self.moves.begin(params)
        else:
            self._outbox.orders.lost.append(params.engines)

    def finished(self, request: Request, tables: Sequence[Sequence[int]] = ()) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks are held until ``finished_sending``, and kv_transfer_params."""
        self.consumptions.finished(request.request_id)
        held, moved = self.moves.finished(request, tables)
        if moved is not None:
            return held, self._address() | moved
        if request.request_id not in self.productions:
            return False, self._describe(request)
        produced = self.productions.finished(request)
        if produced is None:
            return False, None
        transfer_id, prompt_tokens = produced
        return True, {
            **self._address(),
            "transfer_id": transfer_id,
            "remote_request_id": request.request_id,
            "remote_num_tokens": prompt_tokens,
        }

    def reset(self) -> None:
        """Stop sharing KV: the weights in memory may have changed, which the identity does not
        cover.

        This engine sends no more KV of prompts in progress, and the digests of later prompts match
        no other engine's. Other transfers continue.
        """
        logger.warning(
            "Tandem: the caches of engine %s were reset, so it shares no KV until it restarts: its weights may not be "
            "those of its files",
            self.incarnation,
        )
        self._prompts.reset()
        self.productions.reset()

    def stats(self) -> TandemStats | None:
        return self._outbox.stats.take()

    def orders(self, output: SchedulerOutput) -> Orders:
        orders = self._outbox.take_orders()
        orders.report = bool(self.quarantine) or self.consumptions.delayed
        self.consumptions.ran(output.num_scheduled_tokens, output.preempted_req_ids or ())
        self.productions.schedule(output, orders)
        return orders

    def _describe(self, request: Request) -> dict[str, Any] | None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode") and params.get("describe"):
            multiple = self.productions.first_token_multiple
            return self._address() | {"first_token_multiple": multiple} | self.described
        return None

    def _address(self) -> dict[str, Any]:
        assert self._server is not None, (
            "the side channel has not been started: vLLM has not passed the workers' metadata"
        )
        address = EngineAddress(self.incarnation, self.config.reachable_host, self._server.port)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": address.incarnation,
            "remote_host": address.host,
            "remote_port": address.port,
            "tp_size": self.tp_size,
        }


def _not_transferred(request: Request, reason: str) -> None:
    logger.warning(
        "request %s: its KV is not transferred, and this engine computes its prompt: %s", request.request_id, reason
    )
