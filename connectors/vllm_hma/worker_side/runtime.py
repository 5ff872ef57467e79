"""Run the state machines of one rank: pass events to them, and carry out their actions.

vLLM's hooks, the progress thread and the threads of handshakes, digests and probes call the same
machines under one lock. The hooks apply the scheduler side's orders and hand over each step's KV;
the progress thread answers peers, polls writes and checks deadlines meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from connectors.codec import decode
from connectors.errors import PlanError, TransportError, WireError
from connectors.protocol.actions import (
    Connect,
    ConsumerAction,
    Due,
    Forget,
    Freed,
    ProducerAction,
    Received,
    Send,
    Sent,
    Verify,
    Write,
)
from connectors.protocol.agent_metadata import AgentMetadata
from connectors.protocol.consumer import Consumer
from connectors.protocol.engines import Partner
from connectors.protocol.params import names_engine
from connectors.protocol.producer import Producer
from connectors.protocol.wire import AwaitStart, Cancel, Hello, Message, Offer, Peer, Refused, Welcome
from connectors.transport.base import Transport
from connectors.transport.device_digest import CacheMemory
from connectors.vllm_hma.config import ConnectorConfig
from connectors.vllm_hma.handshake.handshaker import Handshaker
from connectors.vllm_hma.handshake.message_sender import MessageSender, agent_name
from connectors.vllm_hma.handshake.peers import Peers
from connectors.vllm_hma.handshake.probe import WorkerProbe
from connectors.vllm_hma.metrics import RankTally, TandemStats
from connectors.vllm_hma.orders import Finished, Orders, Receive
from connectors.vllm_hma.reports import Kept, WorkerReport
from connectors.vllm_hma.worker_side.accelerator import set_thread_device
from connectors.vllm_hma.worker_side.progress_thread import ProgressThread
from connectors.vllm_hma.worker_side.receiving import Verifier, order_of
from connectors.vllm_hma.worker_side.steps import Begun, Ended, LayersComputed, StepFence, Steps, Zeroed
from connectors.vllm_hma.worker_side.trace import Trace
from connectors.vllm_hma.worker_side.writes import Writes

logger = logging.getLogger(__name__)

# Pauses of the progress thread, in seconds. NIXL moves bytes and messages only when it is called,
# on both sides. RDMA writes from a device end within microseconds: for _SPIN_S after a post from
# device memory, pauses only let other threads take the lock and the GIL.
_SPIN_S, _SPIN_PAUSE_S = 0.002, 0.00002
_BUSY_S = 0.0005
_OPEN_S = 0.001
_IDLE_S = 0.01

_ENGINE_LOST = "a supervisor reports that the prefill engine has ended"


class WorkerRuntime:
    """State machines, transport and threads of one rank.

    ``views``          tensors of the KV cache, which digests of KV on an accelerator read
    ``zeroes_blocks``  whether vLLM zeroes new blocks of this cache (``Blocks.zero_edges``)
    ``late_orders``    whether vLLM's runner may overwrite freed blocks before it calls the
                       connector. Its V2 runner queues kernels that zero and copy blocks first
                       (vllm/v1/worker/gpu/model_runner.py: ``update_requests``, ``pre_forward``)

    Raises OSError if the trace file cannot be opened, and RuntimeError if no thread can start.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        agent_metadata: AgentMetadata,
        transport: Transport,
        fence: StepFence,
        views: Sequence[torch.Tensor] = (),
        zeroes_blocks: bool = False,
        late_orders: bool = False,
    ) -> None:
        self.agent_metadata = agent_metadata
        self._limits = config.limits
        self._me = Peer(agent_metadata.incarnation, agent_metadata.rank)
        self._key = config.keys.messages
        self._transport = transport
        self._message_sender = MessageSender(self._me, transport, config.keys.messages)
        self._steps = Steps(agent_metadata.layout.groups, fence)
        self._on_device = agent_metadata.layout.memory_kind.memory != "DRAM"
        # By layer, most of the last chunk's transfer overlaps with the computation of later layers.
        # Earlier chunks overlap with the next chunk's anyway.
        self._by_layers = config.streaming == "layer" or (config.streaming == "auto" and not self._on_device)
        self._trace = Trace(config.trace_path, agent_metadata.incarnation, agent_metadata.rank)
        self._tally = RankTally(agent_metadata.rank)
        self._lock = threading.RLock()
        self._late_orders = late_orders
        # On a device, the kernels that zero blocks may run after the step's hooks.
        self._zeroes_late = zeroes_blocks and self._on_device
        self._producer = Producer(agent_metadata.layout.groups, config.limits, late_orders)
        self._consumer = Consumer(agent_metadata.layout.groups, config.limits)
        self._peers = Peers(self._producer, self._consumer, transport, self._message_sender, self._lock)
        self._writes = Writes(
            agent_metadata.layout.memory_kind,
            transport,
            self._message_sender,
            self._peers,
            self._producer,
            self._tally,
            self._trace,
            self._lock,
        )
        self._round: dict[str, Callable[[float], None]] = {
            "reading messages": self._read_messages,
            "sending computed KV": self._take_computed,
            "polling writes": lambda now: self._perform(self._writes.poll(now)),
            "checking deadlines of sent transfers": lambda now: self._perform(self._producer.tick(now)),
            "checking deadlines of received transfers": lambda now: self._perform(self._consumer.tick(now)),
            "watching workers": self._watch_workers,
        }
        self._results = KVConnectorTransferResults()
        self._report = WorkerReport()
        set_device = partial(set_thread_device, fence.device)
        self._handshaker = Handshaker(
            agent_metadata,
            self._message_sender,
            self._peers,
            CacheMemory(agent_metadata.layout, views),
            config.integrity != "off",
            config.limits.handshake_s,
            config.keys.identity,
            self._connected,
            self._connect_failed,
            set_device,
        )
        self._probe = WorkerProbe(config.limits.cancel_s, config.keys.identity, self._worker_lost, set_device)
        self._verifier = Verifier(set_device, self._verified)
        self._progress_thread = ProgressThread(self._progress, _IDLE_S, set_device)
        self._progress_thread.start()

    # Hooks of vLLM.

    def before_forward(self, orders: Orders) -> None:
        """Apply the orders that must precede this step, which may overwrite reallocated blocks.

        This rank sends no more KV of requests that ended without holding their blocks. Without late
        orders, this waits for writes that read blocks of preempted requests, at most fence_s after
        each was begun.
        """
        with self._lock:
            now = time.monotonic()
            for each in orders.expects:
                expected = each.request_id, each.transfer_id, each.prompt_tokens, each.prompt_digest
                self._perform(self._producer.expect(*expected, now))
            for request_id in orders.starts:
                self._perform(self._producer.starting(request_id, now))
            for finished in orders.finished:
                if not finished.held:
                    self._steps.drop(finished.request_id)
                    self._finish(finished)
            # Only rank 0 of the decode engine sends AwaitStart: a prompt starts on all ranks of the
            # prefill engine in one step.
            for queue in orders.queues if self.agent_metadata.rank == 0 else ():
                self._perform(self._consumer.queue(queue.request_id, queue.transfer_id, queue.producer, now))
        if orders.expects or orders.queues:
            # An idle progress thread pauses longer than a peer needs to answer.
            self._progress_thread.wake()
        if orders.preempted:
            self._fence_preempted(orders.preempted)
        with self._lock:
            self._perform(self._producer.orders_applied(time.monotonic()))
            if self._by_layers:
                self._steps.begin([chunk for chunk in orders.chunks if chunk.last])

    def _fence_preempted(self, request_ids: list[str]) -> None:
        """Wait for writes that read blocks of preempted requests; abort the unsafe deliveries:
        those with only some of a step's layers, and those whose writes may have read overwritten
        blocks.

        The lock is released between polls; no new write reads these blocks.
        """
        with self._lock:
            for request_id in request_ids:
                self._steps.drop(request_id)
                self._perform(self._producer.preempted(request_id, time.monotonic()))
        # With late orders, the blocks may be overwritten already, so the delivery of a write in
        # flight fails in any case.
        if not self._late_orders:
            while self._poll_fresh_writes(request_ids):
                time.sleep(_BUSY_S)
        with self._lock:
            for request_id in request_ids:
                self._perform(self._producer.fenced(request_id, time.monotonic()))

    def _poll_fresh_writes(self, request_ids: list[str]) -> bool:
        with self._lock:
            now = time.monotonic()
            self._perform(self._writes.poll(now))
            reading = [write_id for each in request_ids for write_id in self._producer.writes_in_flight(each)]
            return any(self._writes.is_newer(write_id, now - self._limits.fence_s) for write_id in reading)

    def _finish(self, finished: Finished) -> None:
        self._perform(self._producer.finished(finished.request_id, finished.held, finished.reason, time.monotonic()))

    def spoil(self, request_ids: Set[str], reason: str) -> None:
        """Abort deliveries before ``layer_computed`` or ``after_forward`` hands over wrong KV."""
        with self._lock:
            for request_id in request_ids:
                self._steps.drop(request_id)
                self._perform(self._producer.finished(request_id, False, reason, time.monotonic()))

    def layer_computed(self, layer: str) -> None:
        """vLLM calls this during the forward pass, so it takes no lock."""
        if self._steps.layer(layer):
            self._progress_thread.wake()

    def after_forward(self, orders: Orders, copying: torch.Event | None = None) -> None:
        """Queue the step's chunks for sending, apply the other orders, and run a round.

        ``copying``  event before which peers must not write to blocks: the store copies them
        """
        now = time.monotonic()
        with self._lock:
            self._producer.stepped(now)
            self._steps.end(orders.chunks)
            if self._zeroes_late or copying is not None:
                self._steps.zero(orders.receives, None if self._zeroes_late else copying)
            else:
                for receive in orders.receives:
                    self._receive(receive, now)
            for unsent in self._steps.take(lambda each: each.request_id in orders.aborts):
                self._refuse(unsent, "the request was aborted", now)
            for request_id in orders.aborts:
                self._perform(self._consumer.abort(request_id, now))
            for release in orders.releases:
                self._perform(self._consumer.release(release.transfer_id, release.producer, now))
            for transfer_id in orders.discards:
                self._perform(self._producer.discard(transfer_id, now))
            for lost in orders.lost:
                for unsent in self._steps.take(partial(_receives_from, lost)):
                    self._perform([Received(unsent.request_id, _ENGINE_LOST)])
                for incarnation in sorted(self._consumer.engines() | self._producer.engines()):
                    if names_engine(lost, incarnation):
                        self._perform(self._consumer.engine_lost(incarnation, _ENGINE_LOST, now))
                        self._perform(self._producer.engine_lost(incarnation, now))
            self._try_round(now)
            for finished in orders.finished:
                if finished.held:
                    self._finish(finished)

    def results(self) -> KVConnectorTransferResults:
        """Run a round; return the requests for which this rank has finished sending or receiving
        since the last call. Those received include those that failed.
        """
        with self._lock:
            self._try_round(time.monotonic())
            taken, self._results = self._results, KVConnectorTransferResults()
        return taken

    def report(self) -> WorkerReport | None:
        """Call after ``results`` of the step: it must include their quarantine."""
        with self._lock:
            taken, self._report = self._report, WorkerReport()
        return taken or None

    def stats(self) -> TandemStats | None:
        with self._lock:
            return self._tally.take(self.counts())

    def counts(self) -> dict[str, int]:
        with self._lock:
            return self._producer.counts() | self._consumer.counts()

    def close(self) -> None:
        if self._progress_thread.closed:
            return
        self._progress_thread.close()
        self._handshaker.close()
        self._probe.close()
        self._verifier.close()
        with self._lock:
            self._transport.close()
            self._trace.close()

    # Progress thread.

    def _progress(self) -> float:
        with self._lock:
            if not self._progress_thread.closed:
                self._try_round(time.monotonic())
        if not self._progress_thread.closed and self._writes.post_slice():
            return 0.0
        with self._lock:
            return self._pause_s()

    def _pause_s(self) -> float:
        if self._writes.in_flight() or self._steps:
            spins = self._on_device and time.monotonic() - self._writes.posted_at < _SPIN_S
            return _SPIN_PAUSE_S if spins else _BUSY_S
        busy = self._handshaker.busy or self._producer.busy or self._consumer.busy
        return _OPEN_S if busy else _IDLE_S

    def _try_round(self, now: float) -> None:
        """Never raises: an exception would end the engine or the progress thread."""
        for name, part in self._round.items():
            try:
                part(now)
            except Exception:
                logger.exception(
                    "Tandem: %s failed in a round of transfer work; the round's other parts run, and the next round "
                    "tries again",
                    name,
                )

    def _read_messages(self, now: float) -> None:
        for sender, frame in self._transport.notifications():
            # An error in one frame must not prevent the others.
            try:
                self.frame_received(sender, frame, now)
            except Exception:
                logger.exception("Tandem: cannot handle a frame from %.80s", sender)

    def _watch_workers(self, now: float) -> None:
        suspects = self._consumer.suspects()
        self._probe.watch(suspects | self._producer.suspects(), self._consumer.addresses() if suspects else ())

    def _take_computed(self, now: float) -> None:
        for entry in self._steps.passed():
            match entry:
                case Begun(chunks):
                    for chunk in chunks:
                        self._producer.begin(chunk.request_id, chunk.new_ids, chunk.computed_tokens)
                case LayersComputed(request_ids, group, stop):
                    self._perform(self._producer.layers_computed(request_ids, group, stop, now))
                case Ended(chunks, begun):
                    for chunk in chunks:
                        self._trace.event("chunk", request=chunk.request_id, tokens=chunk.computed_tokens)
                        new_ids = [()] * len(chunk.new_ids) if chunk.request_id in begun else chunk.new_ids
                        self._perform(self._producer.progress(chunk.request_id, new_ids, chunk.computed_tokens, now))
                case Zeroed(receives):
                    for receive in receives:
                        self._receive(receive, now)

    def frame_received(self, sender: str, frame: bytes, now: float) -> None:
        """Drop a malformed frame, one with a wrong tag, sender or receiver, and a stranger's."""
        try:
            envelope = decode(frame, self._key)
        except WireError as error:
            logger.warning("Tandem: dropped a frame from %.80s: %s", sender, error)
            return
        if sender != agent_name(envelope.sender) or envelope.receiver != self._me:
            logger.warning("Tandem: dropped a frame from %.80s: its sender or receiver does not match", sender)
            return
        with self._lock:
            self._handle(envelope.sender, envelope.message, now)

    def _handle(self, sender: Peer, message: Message, now: float) -> None:
        match message:
            case Hello():
                self._handshaker.hello_received(sender, message)
            case Welcome() | Refused():
                self._handshaker.answer_received(sender, message)
            case AwaitStart() | Offer() | Cancel():
                if not self._producer.knows(sender):
                    logger.warning(
                        "Tandem: dropped %s of %s: this consumer has not sent Hello, or was removed",
                        message.kind,
                        sender,
                    )
                    return
                self._peers.spoke(sender)
                self._trace.event(message.kind, transfer=message.transfer_id, consumer=sender.rank)
                self._perform(self._producer.message(sender, message, now))
            case _:
                self._peers.spoke(sender)
                self._perform(self._consumer.message(sender, message, now))

    # Actions.

    def _perform(self, actions: Iterable[ProducerAction | ConsumerAction]) -> None:
        """Carry out actions and those that follow from them. Log a failure and go on."""
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            try:
                todo.extend(self._carry_out(action))
            except Exception:
                logger.exception("Tandem: the action %s failed; carrying out the others", type(action).__name__)

    def _carry_out(self, action: ProducerAction | ConsumerAction) -> Sequence[ProducerAction | ConsumerAction]:
        match action:
            case Send(peer, message):
                return self._send(peer, message)
            case Write() as write:
                self._progress_thread.wake()
                return self._writes.begin(write)
            case Sent(request_id):
                self._results.finished_sending.add(request_id)
                self._trace.event("sent", request=request_id)
            case Forget(peer):
                self._peers.forget(peer)
            case Connect(engine):
                self._handshaker.connect(engine)
                self._progress_thread.wake()
            case Due(request_id, transfer_id, failure) as due:
                self._report.due.append(due)
                if failure is not None:
                    self._ended(request_id, failure)
                self._trace.event("due", request=request_id, transfer=transfer_id, failure=failure)
            case Verify() as verify:
                self._verifier.submit(verify)
            case Received(request_id, failure, quarantine):
                self._results.finished_recving.add(request_id)
                if failure is not None:
                    self._results.failed_recving.add(request_id)
                if quarantine is not None:
                    self._report.begun.append(Kept(request_id, quarantine))
                self._ended(request_id, failure)
                self._trace.event("received", request=request_id, failure=failure)
            case Freed(request_id, transfer_id):
                self._report.ended.append(Kept(request_id, transfer_id))
        return ()

    def _ended(self, request_id: str, failure: str | None) -> None:
        self._tally.ended(request_id, time.monotonic(), failure is not None)
        if failure is not None:
            logger.warning(
                "Tandem: the KV transfer of request %s failed: %s. Unless the request was aborted, this engine "
                "computes its prompt",
                request_id,
                failure,
            )

    def _send(self, peer: Peer, message: Message) -> list[ConsumerAction]:
        try:
            self._message_sender.send(peer, message)
        except TransportError as error:
            logger.warning("Tandem: cannot send %s, so its transfer may fail: %s", message.kind, error)
            return self._consumer.undelivered(peer, message, time.monotonic())
        return []

    def _receive(self, receive: Receive, now: float) -> None:
        self._tally.asked(receive.request_id, now)
        try:
            order = order_of(receive, self.agent_metadata.layout.groups)
        except PlanError as error:
            self._refuse(receive, str(error), now)
            return
        self._trace.event(
            "receive",
            request=receive.request_id,
            transfer=receive.transfer_id,
            blocks=dict(enumerate(map(len, order.groups))),
        )
        self._perform(self._consumer.start(order, now))

    def _refuse(self, receive: Receive, reason: str, now: float) -> None:
        self._perform([Received(receive.request_id, reason)])
        self._perform(self._consumer.release(receive.transfer_id, receive.producer, now))

    # Called by other threads.

    def _connected(self, incarnation: str, found: list[Partner]) -> None:
        with self._lock:
            self._perform(self._consumer.connected(incarnation, found, time.monotonic()))

    def _connect_failed(self, incarnation: str, reason: str) -> None:
        with self._lock:
            self._perform(self._consumer.connect_failed(incarnation, reason, time.monotonic()))

    def _verified(self, verify: Verify, problem: str | None, seconds: float) -> None:
        with self._lock:
            # Without an expected digest, units that have arrived before Fin were hashed.
            name = "verified" if verify.expected else "hashed"
            self._trace.event(name, transfer=verify.transfer_id, seconds=seconds, problem=problem)
            self._perform(self._consumer.verified(verify.transfer_id, verify.peer, problem, time.monotonic()))

    def _worker_lost(self, peer: Peer, reason: str) -> None:
        with self._lock:
            self._perform(self._consumer.worker_lost(peer, reason, time.monotonic()))
            self._perform(self._producer.worker_lost(peer, time.monotonic()))


def _receives_from(engines: str, receive: Receive) -> bool:
    return names_engine(engines, receive.producer.incarnation)
