"""Decode requests of one engine: orders the workers to receive their KV.

A router may send both requests of a transfer at once, and prefill may compute other requests first.
If the consumer has other requests for that producer, it queues the next without blocks
(``matched_tokens`` returns None, vLLM skips it) until prefill is about to start the prompt. Else it
allocates at once: an idle prefill engine computes the first chunk before an answer could arrive
(docs/decisions/0032).

A consumer computes the prompt's last token itself to get logits. vLLM also lets a connector load
all tokens, and then recomputes the last one (vllm/v1/core/sched/scheduler.py,
``_update_waiting_for_remote_kv``). That would be wrong here: sliding-window groups have freed the
oldest token in its window, and a state already includes it. If the producer samples the answer's
first token, the consumer receives whole blocks only and computes the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from connectors.protocol.actions import Due
from connectors.protocol.params import ConsumeParams, whole_blocks
from connectors.vllm_hma.model.adapters import adapter_of
from connectors.vllm_hma.orders import Queue, Receive, Release
from connectors.vllm_hma.scheduler_side.blocks import Blocks
from connectors.vllm_hma.scheduler_side.failed_loads import FailedLoads
from connectors.vllm_hma.scheduler_side.outbox import Outbox
from connectors.vllm_hma.scheduler_side.prompts import Prompts
from connectors.vllm_hma.scheduler_side.quarantine import Quarantine
from connectors.vllm_hma.scheduler_side.shared_transfers import SharedTransfers

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Consumptions:
    """Decode requests with a transfer, until they run."""

    def __init__(self, outbox: Outbox, blocks: Blocks, prompts: Prompts, quarantine: Quarantine) -> None:
        self._outbox = outbox
        self._prompts = prompts
        self._consumptions: dict[str, ConsumeParams] = {}
        self._queued: set[str] = set()
        # Request and producer's incarnation of each transfer in progress, by request id.
        self._taken: dict[str, tuple[Request, str]] = {}
        # Requests of any kind that a step has run, until they end or are preempted.
        self._running: set[str] = set()
        self._shared = SharedTransfers()
        self._failed = FailedLoads(blocks, quarantine)

    def new(self, request: Request, params: ConsumeParams) -> None:
        if not self._shared.join(params.transfer_id, request.request_id):
            return
        if not params.moved and self._prompts.divides_image(request, _end_token(request, params)):
            # The producer makes the same check and sends no KV.
            self._outbox.stats.count("requests", "recomputed")
            self._outbox.orders.releases.append(Release(params.transfer_id, params.producer))
            return
        producers = {each.producer.incarnation for each in self._consumptions.values()}
        producers |= {incarnation for _, incarnation in self._taken.values()}
        self._consumptions[request.request_id] = params
        if params.producer.incarnation in producers and not params.computed:
            self._queued.add(request.request_id)
            self._outbox.orders.queues.append(Queue(request.request_id, params.transfer_id, params.producer))

    def awaits_prefix(self, request_id: str) -> bool:
        """Return whether this request waits for KV that another request of its transfer receives.
        If that transfer fails after its start, the wait ends when ``received`` returns that
        request.
        """
        receiver = self._shared.receiver_of(request_id)
        return receiver is not None and (
            receiver in self._consumptions or receiver in self._taken or receiver in self._failed
        )

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return the number of tokens after ``computed_tokens`` to receive: 0 without a transfer,
        or if it has started; None while a queued request needs KV. No side effects: vLLM may call
        it repeatedly.
        """
        if request.request_id not in self._consumptions:
            return 0
        params = self._consumptions[request.request_id]
        tokens = max(0, _end_token(request, params) - computed_tokens)
        return None if tokens and request.request_id in self._queued else tokens

    def end_token(self, request: Request) -> int:
        return _end_token(request, self._consumptions[request.request_id])

    def due(self, reported: Iterable[Due]) -> None:
        """A Release makes the other ranks cancel a transfer that rank 0 has cancelled."""
        for due in reported:
            params = self._consumptions.get(due.request_id)
            # A later request may have the same id.
            if params is None or params.transfer_id != due.transfer_id or due.request_id not in self._queued:
                continue
            self._queued.discard(due.request_id)
            if due.failure is not None:
                del self._consumptions[due.request_id]
                self._outbox.stats.count("requests", "recomputed")
            if due.cancelled:
                self._outbox.orders.releases.append(Release(params.transfer_id, params.producer))

    def consumes(self, request_id: str) -> bool:
        return request_id in self._consumptions

    def receives(self, request_id: str) -> bool:
        return request_id in self._taken

    def after_alloc(
        self, request: Request, tables: tuple[list[int], ...], external_tokens: int, loaded_token: int = 0
    ) -> Receive | None:
        """Start or release the request's transfer after vLLM has allocated the request's blocks.

        Return the order for the workers; None if the request has no transfer, needs no KV, or its
        transfer has started: vLLM calls this again after the transfer.

        ``external_tokens``  number of tokens whose KV vLLM expects from this connector
        ``loaded_token``     as in ``Receive``
        """
        params = self._consumptions.pop(request.request_id, None)
        if params is None:
            return None
        self._queued.discard(request.request_id)
        if external_tokens == 0:
            self._outbox.orders.releases.append(Release(params.transfer_id, params.producer))
            return None
        end_token = _end_token(request, params)
        self._taken[request.request_id] = request, params.producer.incarnation
        receive = Receive(
            request_id=request.request_id,
            transfer_id=params.transfer_id,
            producer=params.producer,
            prompt_digest=self._prompts.digest(request, params.moved),
            tables=tuple(tuple(table) for table in tables),
            start_token=end_token - external_tokens,
            end_token=end_token,
            loaded_token=loaded_token,
            adapter=adapter_of(request.lora_request),
        )
        first = max(receive.start_token, loaded_token)
        sources = {
            "own_cache": receive.start_token,
            "store": first - receive.start_token,
            "transfer": end_token - first,
        }
        for source, tokens in sources.items():
            if tokens:
                self._outbox.stats.count("prompt_tokens", source, tokens)
        self._outbox.orders.receives.append(receive)
        return receive

    def received(self, request_ids: set[str], failed: set[str]) -> set[str]:
        """Handle requests whose transfers have ended on all workers.

        Return those for vLLM's ``finished_recving``: vLLM schedules them, or frees the blocks of
        those that have ended. This or a later call returns the ``failed`` ones
        (``failed_loads.py``).
        """
        resumed = set(request_ids)
        for request_id in request_ids & self._taken.keys():
            request, _ = self._taken.pop(request_id)
            if request_id in failed:
                self._outbox.stats.count("requests", "recomputed")
                self._failed.add(request)
                resumed.discard(request_id)
            else:
                self._outbox.stats.count("requests", "received")
        return resumed | self._failed.take_fitting(self._running)

    @property
    def delayed(self) -> bool:
        return bool(self._failed)

    def ran(self, request_ids: Iterable[str], preempted: Iterable[str] = ()) -> None:
        self._running.difference_update(preempted)
        self._running.update(request_ids)

    def finished(self, request_id: str) -> None:
        self._failed.left(request_id)
        self._running.discard(request_id)
        self._queued.discard(request_id)
        self._shared.left(request_id)
        params = self._consumptions.pop(request_id, None)
        if params is not None:
            self._outbox.orders.releases.append(Release(params.transfer_id, params.producer))
        if request_id in self._taken:
            del self._taken[request_id]
            self._outbox.orders.aborts.append(request_id)


def _end_token(request: Request, params: ConsumeParams) -> int:
    if params.prompt_multiple:
        return whole_blocks(request.num_prompt_tokens, params.prompt_multiple)
    return (request.num_tokens if params.moved else request.num_prompt_tokens) - 1
