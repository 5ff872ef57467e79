"""Prefill requests of one engine: orders the workers to send their KV.

The producer removes the prompt's last token, so that windows and states end where the consumer
starts to compute (``consumptions.py``).

With ``first_token``, it computes the whole prompt and samples the answer's first token
(docs/decisions/0046). It sends whole blocks only. While the workers send them, a further step
computes the remaining tokens, whose KV lies in other blocks. That step also moves the windows on,
so the scheduler side takes references to the blocks of the windows that the consumer needs. It
would change a state that is being sent, so ``first_token_multiple`` is 0 for models with states.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from connectors.planning.blocks import first_needed_token
from connectors.planning.layout import WINDOWED, Group, GroupKind
from connectors.protocol.params import ProduceParams, whole_blocks
from connectors.vllm_hma.kv_store.orders import scheduled
from connectors.vllm_hma.model.adapters import adapter_of
from connectors.vllm_hma.orders import Chunk, Expect, Finished, Orders
from connectors.vllm_hma.scheduler_side.blocks import Blocks
from connectors.vllm_hma.scheduler_side.outbox import Outbox
from connectors.vllm_hma.scheduler_side.prompts import Prompts
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

    ``prompt_tokens``  number of prompt tokens after whose computation the KV to send is complete
    ``sent``           number of block ids that the workers have, by group
    ``complete``       whether vLLM has finished the request with complete KV
    ``starting``       whether the workers have its ``starts`` order: its prompt is about to start
    ``request``        the request whose last tokens a further step computes, for the answer's first
                       token; None without ``first_token`` or a whole block
    ``windows``        references to the blocks of the consumer's windows, some of which vLLM frees
                       after the step for the first token
    """

    transfer_id: str
    prompt_tokens: int
    sent: list[int]
    complete: bool = False
    starting: bool = False
    request: Request | None = None
    windows: list[KVCacheBlock] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Productions:
    """Prefill requests with a transfer, until their KV has been sent."""

    outbox: Outbox
    blocks: Blocks
    prompts: Prompts
    groups: tuple[Group, ...]
    step_tokens: int
    drafts_read_next_token: bool
    speculates: bool

    def __post_init__(self) -> None:
        self.first_token_multiple = 0 if self.speculates else first_token_multiple(self.groups)
        self._productions: dict[str, _Production] = {}
        # Prompt tokens left to compute, by request id, in order of arrival. A request preempted
        # after its last chunk comes last.
        self._tokens_left: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._productions

    def new(self, request: Request, params: ProduceParams) -> None:
        """Order Expect, and change the prompt (module docstring). If this engine cannot compute the
        KV that the consumer needs, leave the request unchanged and send no KV, with a warning.
        """
        tokens = request.num_prompt_tokens - 1
        if params.first_token and self.first_token_multiple:
            tokens = whole_blocks(request.num_prompt_tokens, self.first_token_multiple)
        refusal = self._refusal(request, params, tokens)
        if refusal is not None:
            logger.warning(
                "the KV of request %s is not sent, so decode computes the prompt: %s", request.request_id, refusal
            )
            return
        digest = self.prompts.digest(request)
        if not params.first_token:
            if self.drafts_read_next_token:
                sample_last_token(request)
            drop_last_token(request)
            tokens = request.num_prompt_tokens
        # The consumer needs no KV of a prompt without a whole block.
        production = _Production(
            params.transfer_id or uuid.uuid4().hex, tokens or request.num_prompt_tokens, [0] * len(self.groups)
        )
        if params.first_token and tokens:
            production.request = request
            hide_last_tokens(request, tokens)
        self._productions[request.request_id] = production
        self._tokens_left[request.request_id] = production.prompt_tokens
        self.outbox.orders.expects.append(
            Expect(
                request.request_id,
                production.transfer_id,
                production.prompt_tokens,
                digest,
                adapter_of(request.lora_request),
            )
        )

    def _refusal(self, request: Request, params: ProduceParams, tokens: int) -> str | None:
        if request.max_tokens != 1:
            # Decoding would move the windows, and vLLM would free blocks that the consumer needs.
            return f"a prefill request must set max_tokens=1, not {request.max_tokens}"
        if any(ended.request_id == request.request_id for ended in self.outbox.orders.finished):
            # Workers apply `orders.finished` after `orders.expects`, so the end of the earlier
            # request would also end this one's transfer.
            return "an earlier request with this id ended in the same step"
        if request.resumable:
            # The session continues after the prompt, and vLLM frees blocks of its windows.
            return "the request is a session of streamed input"
        if params.first_token and not self.first_token_multiple:
            return (
                "the request sets first_token, but this engine cannot sample first tokens (first_token_multiple is "
                "0), because its model has states or speculative_config is set"
            )
        if self.prompts.divides_image(request, tokens):
            return "the KV would end within an image whose tokens attend to later ones"
        return None

    def finished(self, request: Request) -> tuple[str, int] | None:
        """Return (transfer id, tokens whose KV is sent); None if this KV is incomplete."""
        request_id = request.request_id
        self._tokens_left.pop(request_id, None)
        production = self._productions[request_id]
        complete = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        complete = complete and request.num_computed_tokens >= production.prompt_tokens
        reason = (
            "" if complete else f"the prefill request ended before its KV was complete ({request.status.name.lower()})"
        )
        self.outbox.orders.finished.append(Finished(request_id, complete, reason))
        if not complete:
            self._end(request_id)
            return None
        production.complete = True
        return production.transfer_id, production.prompt_tokens

    def sent(self, request_ids: set[str]) -> None:
        for request_id in request_ids & self._productions.keys():
            self._end(request_id)
            self.outbox.stats.count("requests", "sent")

    def reset(self) -> None:
        """Order the workers to abort the transfers of prompts that vLLM has not finished."""
        for request_id, production in self._productions.items():
            if not production.complete:
                reason = "the prefill engine was reset: its weights may have changed"
                self.outbox.orders.finished.append(Finished(request_id, False, reason))

    def _end(self, request_id: str) -> None:
        self.blocks.drop(self._productions.pop(request_id).windows)

    def schedule(self, output: SchedulerOutput, orders: Orders) -> None:
        for request_id in output.preempted_req_ids or ():
            production = self._productions.get(request_id)
            if production is not None:
                self.blocks.drop(production.windows)
                production.windows = []
                production.sent = [0] * len(self.groups)
                self._tokens_left[request_id] = production.prompt_tokens
                orders.preempted.append(request_id)
                if production.request is not None:
                    hide_last_tokens(production.request, production.prompt_tokens)
        for new in output.scheduled_new_reqs:
            production = self._productions.get(new.req_id)
            if production is not None and production.request is not None:
                send_whole_prompt(new)
        for request_id, computed_before in scheduled(output):
            production = self._productions.get(request_id)
            if production is not None and computed_before < production.prompt_tokens:
                self._start(request_id, orders)
                orders.chunks.append(self._chunk(request_id, production, computed_before, output))
        # The next step can reach these prompts, if vLLM keeps to arrival order.
        ahead = 0
        for request_id, tokens in self._tokens_left.items():
            if ahead >= self.step_tokens:
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
                # After a failed load of the KV store, vLLM computes the last chunk again.
                self.blocks.drop(production.windows)
                production.windows = self.blocks.take(request_id, self._windows_at(computed))
                show_last_tokens(production.request)
        return Chunk(request_id, new_ids, computed, computed == production.prompt_tokens)

    def _windows_at(self, token: int) -> list[slice]:
        return [
            slice(first_needed_token(group, token) // group.block_tokens, token // group.block_tokens)
            if group.kind in WINDOWED
            else slice(0)
            for group in self.groups
        ]


def first_token_multiple(groups: Sequence[Group]) -> int:
    """Granularity, in tokens, of the KV sent with ``first_token``; 0 if a group holds states."""
    if any(group.kind is GroupKind.STATE for group in groups):
        return 0
    return math.lcm(*(group.block_tokens for group in groups))
