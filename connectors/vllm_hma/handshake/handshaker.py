"""Handshakes of one worker, in both roles, in background threads.

    consumer worker                                      producer engine / worker
    fetch the engine's agent metadata  -------------->  side channel
    check, plan, prove the plans, add peers
    Hello(agent metadata)              -------------->  add peer, check, plan
                                       <--------------  Welcome | Refused(reason)

Messages have then passed in both directions: the first offer needs no connection setup.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from connectors.codec import decode_agent_metadata, encode_agent_metadata
from connectors.errors import HandshakeError, TandemError
from connectors.planning.plan import PairPlan, consumer_ranks, plan_pair
from connectors.planning.verify import prove_plans
from connectors.protocol.agent_metadata import AgentMetadata, EngineMetadata, check_peers
from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.engines import Partner
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Hello, Peer, Refused, Welcome
from connectors.transport.device_digest import CacheMemory
from connectors.transport.digest import End, digests
from connectors.vllm_hma.handshake.message_sender import MessageSender, agent_name
from connectors.vllm_hma.handshake.peers import Peers
from connectors.vllm_hma.handshake.processes import Liveness, liveness
from connectors.vllm_hma.handshake.side_channel import fetch_metadata

logger = logging.getLogger(__name__)

# Two pools: a connect may wait for a silent peer, and must not delay answers to Hellos.
_CONNECT_THREADS = 32
_ACCEPT_THREADS = 4
MAX_PENDING_HELLOS = 256
_HELLO_AGAIN_S = 1.0


@dataclass(eq=False, repr=False)
class Handshaker:
    """``compares_digests``  whether this worker, as a consumer, compares digests of received bytes
    ``identity``          key for the side channels of other engines (``Keys.identity``)
    ``on_start``          called before each handshake, to prepare its thread

    Callbacks run in threads of this class, without the worker's lock. The first argument of
    ``on_connected`` and ``on_failed`` is a producer engine's incarnation.
    """

    agent_metadata: AgentMetadata
    message_sender: MessageSender
    peers: Peers
    memory: CacheMemory
    compares_digests: bool
    handshake_s: float
    identity: bytes
    on_connected: Callable[[str, list[Partner]], None]
    on_failed: Callable[[str, str], None]
    on_start: Callable[[], None]

    def __post_init__(self) -> None:
        self._connects = ThreadPoolExecutor(_CONNECT_THREADS, "tandem-connect")
        self._accepts = ThreadPoolExecutor(_ACCEPT_THREADS, "tandem-accept")
        for pool in (self._connects, self._accepts):
            # One thread starts now: it runs what is submitted when no further thread can start.
            pool.submit(self.on_start)
        self._lock = threading.Lock()
        self._connecting: set[str] = set()
        self._pending_hellos: set[Peer] = set()
        # Of each worker that has received Hello: the reason of Refused, or None for Welcome.
        self._answers: dict[Peer, Future[str | None]] = {}

    def connect(self, engine: EngineAddress) -> None:
        with self._lock:
            if engine.incarnation in self._connecting:
                return
            self._connecting.add(engine.incarnation)
        self._submit(self._connects, self._connect, engine)

    @property
    def busy(self) -> bool:
        return bool(self._connecting)

    def hello_received(self, sender: Peer, message: Hello) -> None:
        """Queue the answer to a Hello. Drop it if too many are pending; the worker repeats it."""
        with self._lock:
            if sender in self._pending_hellos:
                return
            full = len(self._pending_hellos) >= MAX_PENDING_HELLOS
            if not full:
                self._pending_hellos.add(sender)
        if full:
            logger.warning("Tandem: dropped the Hello of %s: %d other Hellos are pending", sender, MAX_PENDING_HELLOS)
            return
        self._submit(self._accepts, self._welcome, sender, message)

    def answer_received(self, sender: Peer, message: Welcome | Refused) -> None:
        with self._lock:
            answer = self._answers.get(sender)
            if answer is not None and not answer.done():
                answer.set_result(message.reason if isinstance(message, Refused) else None)

    def close(self) -> None:
        for pool in (self._connects, self._accepts):
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., None], *arguments: object) -> None:
        # A pool raises RuntimeError after its shutdown, or if no further thread can start. Then the
        # work is already queued, and the pool's first thread runs it.
        with contextlib.suppress(RuntimeError):
            pool.submit(self._guarded, work, *arguments)

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        # The thread pool would discard the exception.
        try:
            work(*arguments)
        except TandemError as error:
            logger.warning(
                "Tandem: a handshake with a decode worker failed; the worker may repeat its Hello: %s", error
            )
        except Exception:
            logger.exception(
                "Tandem: a handshake raised an unexpected error; transfers that wait for it fail at their deadlines"
            )

    def _connect(self, engine: EngineAddress) -> None:
        found: list[Partner] | None = None
        failure = ""
        # The peer table keeps the engine's workers until the state machine has recorded them.
        with contextlib.ExitStack() as handshakes:
            try:
                found = self._shake_hands(engine, handshakes)
            except Exception as error:
                expected = isinstance(error, TandemError)
                failure = str(error) if expected else f"the handshake failed: {error!r}"
                where = engine.incarnation
                logger.warning("Tandem: cannot connect to prefill engine %s: %s", where, failure, exc_info=not expected)
            # Cleared before the callback, so that a later request starts another handshake.
            with self._lock:
                self._connecting.discard(engine.incarnation)
            if found is None:
                self.on_failed(engine.incarnation, failure)
            else:
                self.on_connected(engine.incarnation, found)

    def _shake_hands(self, engine: EngineAddress, handshakes: contextlib.ExitStack) -> list[Partner]:
        self.on_start()
        deadline = time.monotonic() + self.handshake_s
        agent_metadata = fetch_metadata(engine.host, engine.port, engine.incarnation, self.handshake_s, self.identity)
        for worker in agent_metadata.workers:
            check_peers(worker, self.agent_metadata)
        plans = self._plans(agent_metadata)
        prove_plans(self.agent_metadata.layout, list(plans.values()))
        refusals = self._exchange_hellos(agent_metadata, sorted(plans), deadline, handshakes)
        if refusals:
            raise HandshakeError(f"the prefill engine refused this engine: {refusals[0]}")
        partners = []
        for rank, plan in plans.items():
            worker, target = agent_metadata.workers[rank], None
            if self.compares_digests:
                target = digests(plan, self.memory.shared_with(worker.layout.memory_kind), End.TARGET)
            peer, alive = Peer(agent_metadata.incarnation, rank), liveness(worker.process) is Liveness.ALIVE
            partners.append(Partner(peer, plan.shapes, plan.unit_bytes, target, engine, worker.process, alive))
        return partners

    def _exchange_hellos(
        self, engine: EngineMetadata, ranks: list[int], deadline: float, handshakes: contextlib.ExitStack
    ) -> list[str]:
        """Send Hello to these ranks, wait for all answers, and return the reasons of refusals.

        The peer table keeps the ranks until ``handshakes`` is closed.
        """
        hello = Hello(encode_agent_metadata(self.agent_metadata))
        answers: dict[Peer, Future[str | None]] = {Peer(engine.incarnation, rank): Future() for rank in ranks}
        with self._lock:
            self._answers |= answers
        try:
            for peer in answers:
                handshakes.enter_context(self.peers.handshaking(peer))
                worker = engine.workers[peer.rank]
                self.message_sender.connect(peer, worker.transport_metadata, worker.process)
                self.message_sender.send(peer, hello)
            while wait(answers.values(), min(_HELLO_AGAIN_S, max(0.0, deadline - time.monotonic()))).not_done:
                if time.monotonic() >= deadline:
                    raise HandshakeError(
                        f"the prefill engine's workers did not answer Hello within {self.handshake_s:g} s"
                    )
                # A worker with many pending Hellos drops further ones, and messages may be lost.
                for peer in [each for each, answer in answers.items() if not answer.done()]:
                    self.message_sender.send(peer, hello)
            return [reason for answer in answers.values() if (reason := answer.result())]
        finally:
            with self._lock:
                for peer in answers:
                    self._answers.pop(peer, None)

    def _plans(self, engine: EngineMetadata) -> dict[int, PairPlan]:
        mine = self.agent_metadata.layout
        layouts = [worker.layout for worker in engine.workers]
        return {each.tp_rank: plan_pair(each, mine) for each in layouts if mine.tp_rank in consumer_ranks(each, mine)}

    def _welcome(self, sender: Peer, message: Hello) -> None:
        try:
            self.on_start()
            self._accept(sender, message)
        finally:
            with self._lock:
                self._pending_hellos.discard(sender)

    def _accept(self, sender: Peer, message: Hello) -> None:
        with contextlib.ExitStack() as handshaking:
            try:
                agent_metadata = decode_agent_metadata(message.agent_metadata)
                if (agent_metadata.incarnation, agent_metadata.rank) != (sender.incarnation, sender.rank):
                    raise HandshakeError("the Hello has the agent metadata of another worker")
                handshaking.enter_context(self.peers.handshaking(sender))
                self.message_sender.connect(sender, agent_metadata.transport_metadata, agent_metadata.process)
            except TandemError as error:
                # A peer that was not added cannot be answered; its handshake times out.
                logger.warning("Tandem: dropped the Hello of decode worker %.80s: %s", agent_name(sender), error)
                return
            try:
                plan, consumer = self._plan_for(agent_metadata)
            except TandemError as error:
                logger.warning("Tandem: refused decode worker %.80s: %s", agent_name(sender), error)
                self.message_sender.send(sender, Refused(str(error)))
                return
            self.peers.welcome(sender, agent_metadata.layout.memory_kind, plan, consumer)
            self.message_sender.send(sender, Welcome())

    def _plan_for(self, agent_metadata: AgentMetadata) -> tuple[PairPlan, ConsumerPeer]:
        check_peers(self.agent_metadata, agent_metadata)
        mine, theirs = self.agent_metadata.layout, agent_metadata.layout
        ranks = consumer_ranks(mine, theirs)
        plan = plan_pair(mine, theirs)
        source = digests(plan, self.memory.shared_with(theirs.memory_kind), End.SOURCE)
        process = agent_metadata.process
        was_seen = liveness(process) is Liveness.ALIVE
        return plan, ConsumerPeer(ranks, theirs.num_blocks, plan.shapes, source, process, was_seen)
