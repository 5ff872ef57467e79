"""Carry out the ``Write`` actions of one rank, and follow each write until it has ended."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from dataclasses import dataclass

from connectors.errors import FailedWriteError, TandemError, TransportError
from connectors.planning.descriptors import Runs, build_runs, move_bytes
from connectors.planning.layout import MemoryKind
from connectors.planning.plan import PairPlan
from connectors.protocol.actions import Digest, ProducerAction, Write
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Alive
from connectors.transport.base import Transport, WriteHandle
from connectors.vllm_hma.handshake.message_sender import MessageSender, agent_name
from connectors.vllm_hma.handshake.peers import Peers
from connectors.vllm_hma.metrics import RankTally
from connectors.vllm_hma.rate_limited_log import RateLimitedLog
from connectors.vllm_hma.worker_side.trace import Trace

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Posted:
    """A write in progress.

    ``handle``      the transport's handle
    ``engine``      incarnation of the consumer engine
    ``size_bytes``  bytes of the write
    ``since``       time at which the write was posted, in seconds (``time.monotonic()``)
    ``digest``      digest to which the source bytes were added
    ``arrived``     whether all bytes are in the peer's memory; the digest may still read the source
    """

    handle: WriteHandle
    engine: str
    size_bytes: int
    since: float
    digest: Digest | None
    arrived: bool = False


class Writes:
    """Writes of one rank: posts and polls them, and reports their ends to the producer state
    machine.

    ``begin`` and ``poll`` return the actions with which the producer answers these reports. Not
    thread-safe: the owner serialises calls.

    ``posted``  number of writes posted so far
    """

    def __init__(
        self,
        source: MemoryKind,
        transport: Transport,
        message_sender: MessageSender,
        peers: Peers,
        producer: Producer,
        tally: RankTally,
        trace: Trace,
    ) -> None:
        self._source = source
        self._transport = transport
        self._message_sender = message_sender
        self._peers = peers
        self._producer = producer
        self._tally = tally
        self._trace = trace
        self._warn = RateLimitedLog(logger)
        self._handles: dict[int, Posted] = {}
        self.posted = 0

    def in_flight(self) -> frozenset[int]:
        """Return the ids of the unfinished writes."""
        return frozenset(self._handles)

    def is_newer(self, write_id: int, than: float) -> bool:
        """Return whether this write is in progress and was posted after the time ``than``.

        ``than``  in ``time.monotonic()`` seconds
        """
        posted = self._handles.get(write_id)
        return posted is not None and posted.since > than

    def begin(self, write: Write) -> list[ProducerAction]:
        """Post a write; a write without bytes is done at once.

        Of the errors of ``Transport.write``, only a TransportError that is no FailedWriteError
        proves that nothing was posted. After any other one, parts of the write may arrive.
        """
        try:
            memory_kind, plan = self._target(write)
            runs = build_runs(plan, write.moves)
            if not len(runs):
                self._producer.write_posted(write.write_id, 0)
                return self._producer.write_done(write.write_id, time.monotonic())
            # Detect a broken connection with a message first: a failed write may have sent parts.
            self._message_sender.check(write.peer, Alive(write.transfer_id))
        except Exception as error:
            return self._refused(write.write_id, error)
        try:
            handle = self._posted(agent_name(write.peer), runs, memory_kind)
        except FailedWriteError as error:
            return self._failed(write.write_id, error)
        except TransportError as error:
            return self._refused(write.write_id, error)
        except Exception as error:
            return self._failed(write.write_id, error)
        posted = Posted(handle, write.peer.incarnation, runs.total_bytes, time.monotonic(), write.digest)
        self._handles[write.write_id] = posted
        self.posted += 1
        self._producer.write_posted(write.write_id, runs.total_bytes)
        self._add_to_digest(write)
        self._count(write, plan, len(runs))
        return []

    def poll(self, now: float) -> list[ProducerAction]:
        """Remove the writes that have ended; return the producer's actions for them.

        An exception of the transport ends the write as failed: the transport has dropped its
        handle.
        """
        actions: list[ProducerAction] = []
        for write_id, posted in list(self._handles.items()):
            try:
                posted.arrived = posted.arrived or self._transport.poll(posted.handle)
                if not posted.arrived or not self._digested(posted):
                    continue
            except Exception as error:
                del self._handles[write_id]
                actions += self._failed(write_id, error)
            else:
                del self._handles[write_id]
                self._tally.written(posted.engine, posted.size_bytes, time.monotonic() - posted.since)
                self._trace.event("written", write=write_id)
                try:
                    actions += self._producer.write_done(write_id, now)
                except Exception as error:
                    # An error of the state machine. The consumer's deadline ends the transfer. The
                    # other writes' actions must not be lost.
                    self._warn("write done", "".join(traceback.format_exception(error)[-3:]))
        return actions

    def _target(self, write: Write) -> tuple[MemoryKind, PairPlan]:
        known = self._peers.plan(write.peer)
        if known is None:
            raise TransportError(agent_name(write.peer), "the consumer worker has been removed")
        return known

    def _posted(self, peer: str, runs: Runs, target: MemoryKind) -> WriteHandle:
        try:
            return self._transport.write(peer, runs, self._source, target)
        except FailedWriteError:
            # No retry: a second write could complete before the bytes of the first have arrived.
            raise
        except TransportError as error:
            self._message_sender.reconnect(peer, error)
            return self._transport.write(peer, runs, self._source, target)

    def _refused(self, write_id: int, error: Exception) -> list[ProducerAction]:
        """Report to the producer a write of which nothing was posted."""
        return self._producer.write_refused(write_id, self._reason(error), time.monotonic())

    def _failed(self, write_id: int, error: Exception) -> list[ProducerAction]:
        """Report to the producer a failed write of which parts may still arrive."""
        return self._producer.write_failed(write_id, self._reason(error), time.monotonic())

    def _reason(self, error: Exception) -> str:
        self._tally.write_ended("failed")
        if isinstance(error, TandemError):
            logger.warning("Tandem: %s", error)
        else:
            self._warn("write", "a write failed unexpectedly:\n" + "".join(traceback.format_exception(error)[-3:]))
        return str(error) or repr(error)

    def _add_to_digest(self, write: Write) -> None:
        """Hash the source bytes of a write, if the offer requests a digest.

        They are hashed now: if the engine overwrites them before the write reads them, the digests
        differ.
        """
        if write.digest is None:
            return
        try:
            for move in write.moves:
                write.digest.add(move.group, move.src_ids, move.src_parts, move.layers)
            write.digest.ready()
        except Exception:
            # The write continues. The digests will differ, so the consumer computes the prompt.
            self._warn(
                "digest",
                f"cannot hash the bytes of a write, so decode will compute the prompt:\n{traceback.format_exc()}",
            )

    def _digested(self, posted: Posted) -> bool:
        """Return whether the digest has read the source bytes: Fin waits for no device then."""
        try:
            return posted.digest is None or posted.digest.ready()
        except Exception:
            return True  # ``hexdigest`` fails, too, and the producer aborts the delivery

    def _count(self, write: Write, plan: PairPlan, runs: int) -> None:
        sizes: Counter[int] = Counter()
        for move in write.moves:
            sizes[move.group] += move_bytes(plan, move)
        for group, size in sizes.items():
            self._tally.sent_bytes(group, size)
        consumer = write.peer.rank
        self._trace.event(
            "write", write=write.write_id, transfer=write.transfer_id, consumer=consumer, runs=runs, bytes=sizes
        )
