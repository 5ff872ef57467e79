"""Running requests that another engine continues: this engine keeps their KV and sends it.

A request that moves ends with its next token (``upstream/vllm_early_end.py``). All tokens but the
last then have KV, and a state ends with them, as after a prefill request (``productions.py``). The
consumer computes the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from connectors.protocol.params import MoveParams
from connectors.vllm_hma.model.adapters import adapter_of
from connectors.vllm_hma.orders import Chunk, Expect, Finished
from connectors.vllm_hma.scheduler_side.outbox import Outbox
from connectors.vllm_hma.scheduler_side.prompts import Prompts
from connectors.vllm_hma.upstream.vllm_early_end import end_soon, ended_early, has_kv

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Moves:
    """All requests of this engine, and the transfer id of those that are to move."""

    def __init__(self, outbox: Outbox, prompts: Prompts) -> None:
        self._outbox = outbox
        self._prompts = prompts
        self._requests: dict[str, Request] = {}
        self._moving: dict[str, str] = {}

    def new(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def begin(self, params: MoveParams) -> None:
        """End a request with its next token, unless it ends by itself."""
        request = self._requests.get(params.request_id)
        if request is not None and request.prompt_embeds is None and end_soon(request):
            self._moving[request.request_id] = params.transfer_id

    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, object] | None]:
        """Return whether an ended request's blocks stay allocated, and its answer's parameters.

        The parameters are None if the request has not moved. They lack the transfer if the KV of
        the tokens is not complete: vLLM has preempted the request.
        """
        self._requests.pop(request.request_id, None)
        transfer_id = self._moving.pop(request.request_id, None)
        if transfer_id is None or not ended_early(request):
            return False, None
        tokens = request.num_tokens - 1
        if not has_kv(request, tokens):
            return False, {"moved": True}
        orders, request_id = self._outbox.orders, request.request_id
        digest = self._prompts.digest(request, moved=True)
        orders.expects.append(Expect(request_id, transfer_id, tokens, digest, adapter_of(request.lora_request)))
        orders.chunks.append(Chunk(request_id, tuple(map(tuple, tables)), tokens))
        orders.finished.append(Finished(request_id, True, ""))
        return True, {"moved": True, "transfer_id": transfer_id, "remote_num_tokens": tokens}
