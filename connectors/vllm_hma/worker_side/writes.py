"""Carry out the ``Write`` actions of one rank, and follow each write until it has ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from connectors.errors import FailedWriteError, TandemError, TransportError
from connectors.planning.descriptors import Runs, build_runs, move_bytes
from connectors.planning.layout import MemoryKind
from connectors.planning.plan import PairPlan
from connectors.protocol.actions import ProducerAction, Write
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Alive
from connectors.transport.base import Transport, WriteHandle
from connectors.vllm_hma.handshake.message_sender import MessageSender, agent_name
from connectors.vllm_hma.handshake.peers import Peers
from connectors.vllm_hma.metrics import RankTally
from connectors.vllm_hma.worker_side.trace import Trace

logger = logging.getLogger(__name__)


# Limits of one post, a *slice* of a write. A post holds the lock of the NIXL agent, for which
# messages, polls and steps wait: 1.5 ms at 7.8 us a run (CUDA IPC on an H100, whatever the bytes).
# UCX copies from host memory within the post.
SLICE_RUNS = 192
HOST_SLICE_BYTES = 16 * 2**20

# A write with device memory at an end is slow below this bandwidth, beyond the posts of its runs.
# Writes of fewer bytes are not judged: a busy engine delays polls.
SLOW_BYTES_PER_S = 2e9
RUN_S = 10e-6
JUDGED_BYTES = 64 * 2**20

_SLOW = (
    "Tandem: %d MB of KV from or to device memory took %.0f ms (%.2f GB/s), so UCX probably copies it through host "
    "memory over TCP. On one host, CUDA IPC needs engines that see each other's processes and GPUs (one pod, or "
    "hostPID and hostIPC); between hosts, GPUDirect RDMA needs nvidia_peermem or dma-buf. UCX_TLS must allow cuda_ipc "
    "and rc. The metric vllm:tandem_kv_writes counts such writes as slow; they are not logged again"
)


@dataclass(slots=True)
class OpenWrite:
    """A write that has not ended. Times are in ``time.monotonic()`` seconds.

    ``arrived_at``  time at which all slices had ended; the digest may still read the source
    ``slices``      slices that have not been posted; None until its runs have been built
    ``handles``     the transport's handles of the slices in flight, in order
    ``posting``     False once no further slice is posted
    ``dropped``     whether slices were dropped because the delivery has ended
    ``failed``      whether parts of the write may still arrive after ``error``
    """

    write: Write
    target: MemoryKind
    plan: PairPlan
    since: float
    posted_at: float = 0.0
    arrived_at: float = 0.0
    runs: int = 0
    size_bytes: int = 0
    slices: deque[Runs] | None = None
    handles: deque[WriteHandle] = field(default_factory=deque)
    posting: bool = True
    dropped: bool = False
    error: Exception | None = None
    failed: bool = False


@dataclass(eq=False, repr=False)
class Writes:
    """Writes of one rank: posts and polls them, and reports their ends to the producer.

    A write is open from ``begin`` until all its posted slices have ended. One thread calls
    ``post_slice``, without ``lock``; the caller of the other methods holds it. ``begin`` and
    ``poll`` return the actions with which the producer answers the reports.
    """

    source: MemoryKind
    transport: Transport
    message_sender: MessageSender
    peers: Peers
    producer: Producer
    tally: RankTally
    trace: Trace
    lock: threading.RLock

    def __post_init__(self) -> None:
        self._open: dict[int, OpenWrite] = {}
        self._unposted: deque[OpenWrite] = deque()
        self._slow_logged = False
        self.posted_at = float("-inf")

    def in_flight(self) -> frozenset[int]:
        return frozenset(self._open)

    def is_newer(self, write_id: int, than: float) -> bool:
        opened = self._open.get(write_id)
        return opened is not None and opened.since > than

    def begin(self, write: Write) -> list[ProducerAction]:
        now, known = time.monotonic(), self.peers.plan(write.peer)
        if known is None:
            error = TransportError(agent_name(write.peer), "the consumer worker has been removed")
            return self.producer.write_refused(write.write_id, self._reason(error), now)
        opened = OpenWrite(write, *known, now)
        self._open[write.write_id] = opened
        self._unposted.append(opened)
        return []

    def post_slice(self) -> bool:
        """Post the oldest write's next slice; return whether there was one. Never raises."""
        with self.lock:
            if not self._unposted:
                return False
            opened = self._unposted[0]
            opened.dropped = not self.producer.wants(opened.write.write_id)
        try:
            if not opened.dropped and opened.error is None:
                self._post(opened)
        except Exception as error:
            opened.error = opened.error or error
        if opened.dropped or opened.error is not None or not opened.slices:
            with self.lock:
                self._unposted.popleft()
                opened.posting = False
        return True

    def poll(self, now: float) -> list[ProducerAction]:
        """An exception of the transport ends a slice as failed: it has dropped the handle."""
        actions: list[ProducerAction] = []
        for write_id, opened in list(self._open.items()):
            try:
                while opened.handles and self.transport.poll(opened.handles[0]):
                    opened.handles.popleft()
            except Exception as error:
                opened.handles.popleft()
                opened.error, opened.failed = opened.error or error, True
            if opened.posting or opened.handles:
                continue
            opened.arrived_at = opened.arrived_at or time.monotonic()
            if not self._digested(opened):
                continue
            del self._open[write_id]
            try:
                actions += self._ended(opened, now)
            except Exception:
                # An error of the state machine. The consumer's deadline ends the transfer. The
                # other writes' actions must not be lost.
                logger.exception("Tandem: cannot handle the end of a write, so its transfer fails")
        return actions

    def _post(self, opened: OpenWrite) -> None:
        """Only a TransportError that is no FailedWriteError proves that nothing was posted."""
        write = opened.write
        if opened.slices is None:
            runs = build_runs(opened.plan, write.moves)
            host = self.source.memory == "DRAM"
            opened.runs, opened.size_bytes = len(runs), runs.total_bytes
            opened.slices = deque(runs.slices(SLICE_RUNS, HOST_SLICE_BYTES if host else runs.total_bytes))
            if not opened.slices:
                return
            # Detect a broken connection with a message first: a failed write may have sent parts.
            self.message_sender.check(write.peer, Alive(write.transfer_id))
            opened.posted_at = time.monotonic()
        try:
            opened.handles.append(self._posted(agent_name(write.peer), opened.slices.popleft(), opened.target))
        except Exception as error:
            if isinstance(error, FailedWriteError) or not isinstance(error, TransportError):
                opened.failed = True  # no `|=`: it could undo a failure that ``poll`` finds meanwhile
            raise
        self.posted_at = time.monotonic()
        if not opened.slices:
            self._count(opened)
            self._add_to_digest(write)

    def _ended(self, opened: OpenWrite, now: float) -> list[ProducerAction]:
        write_id = opened.write.write_id
        if opened.error is not None:
            report = self.producer.write_failed if opened.failed else self.producer.write_refused
            return report(write_id, self._reason(opened.error), now)
        if opened.dropped:
            return self.producer.write_refused(write_id, "its delivery has ended", now)
        if opened.runs:
            seconds = opened.arrived_at - opened.posted_at
            slow = "VRAM" in (self.source.memory, opened.target.memory) and is_slow(
                opened.size_bytes, opened.runs, seconds
            )
            self.tally.written(opened.write.peer.incarnation, opened.size_bytes, seconds, slow)
            self.trace.event("written", write=write_id)
            if slow and not self._slow_logged:
                self._slow_logged = True
                size = opened.size_bytes
                logger.warning(_SLOW, size / 1e6, 1e3 * seconds, size / seconds / 1e9)
        self.producer.write_posted(write_id, opened.size_bytes)
        return self.producer.write_done(write_id, now)

    def _posted(self, peer: str, runs: Runs, target: MemoryKind) -> WriteHandle:
        try:
            return self.transport.write(peer, runs, self.source, target)
        except FailedWriteError:
            # No retry: a second write could complete before the bytes of the first have arrived.
            raise
        except TransportError as error:
            self.message_sender.reconnect(peer, error)
            return self.transport.write(peer, runs, self.source, target)

    def _reason(self, error: Exception) -> str:
        self.tally.write_ended("failed")
        if isinstance(error, TandemError):
            logger.warning("Tandem: %s", error)
        else:
            logger.error("Tandem: a write failed unexpectedly", exc_info=error)
        return str(error) or repr(error)

    def _add_to_digest(self, write: Write) -> None:
        """The blocks are intact until the write ends, or the delivery is aborted."""
        if write.digest is None:
            return
        try:
            for move in write.moves:
                write.digest.add(move.group, move.src_ids, move.src_parts, move.layers)
            write.digest.ready()
        except Exception:
            # The write continues. The digests will differ, so the consumer computes the prompt.
            logger.exception("Tandem: cannot hash the bytes of a write, so decode will compute the prompt")

    def _digested(self, opened: OpenWrite) -> bool:
        """Return whether the digest has read the source bytes: Fin waits for no device then."""
        write = opened.write
        if write.digest is None or opened.error is not None:
            return True
        try:
            return not self.producer.wants(write.write_id) or write.digest.ready()
        except Exception:
            return True  # ``hexdigest`` fails, too, and the producer aborts the delivery

    def _count(self, opened: OpenWrite) -> None:
        write, sizes = opened.write, Counter[int]()
        for move in write.moves:
            sizes[move.group] += move_bytes(opened.plan, move)
        with self.lock:
            for group, size in sizes.items():
                self.tally.sent_bytes(group, size)
        self.trace.event(
            "write",
            write=write.write_id,
            transfer=write.transfer_id,
            consumer=write.peer.rank,
            runs=opened.runs,
            bytes=sizes,
        )


def is_slow(size_bytes: int, runs: int, seconds: float) -> bool:
    return size_bytes >= JUDGED_BYTES and seconds > size_bytes / SLOW_BYTES_PER_S + runs * RUN_S
