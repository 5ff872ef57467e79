"""First contact between two workers, off the engine's path: both directions, in threads of their own.

    consumer worker                          producer engine / worker
    fetch the engine's card  -------------->  side channel (engine core)
    check, add peers, prove the plans
    Hello(card)              -------------->  check, add peer, plan
                             <--------------  Welcome | Refused(reason)

Both ends have opened their connections when Welcome arrives, so the first offer does not pay for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from connectors.errors import HandshakeError, TandemError
from connectors.planning.heads import partners
from connectors.planning.plan import PairPlan, plan_pair
from connectors.planning.verify import prove_plans
from connectors.protocol.cards import EngineCard, WorkerCard, check_peers, decode_worker_card, encode_worker_card
from connectors.protocol.delivery import Consumer
from connectors.protocol.engines import Partner
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Hello, Peer, Refused, Welcome
from connectors.transport.base import Transport
from connectors.transport.device_digest import CacheMemory
from connectors.transport.digest import End, TransferDigest, digests
from connectors.vllm_hma.complaints import Complaints
from connectors.vllm_hma.peers import Peers
from connectors.vllm_hma.post import Post, agent_name
from connectors.vllm_hma.processes import Liveness, liveness
from connectors.vllm_hma.side_channel import fetch_card

logger = logging.getLogger(__name__)

# Connecting waits for peers that may be silent; greeting must not wait behind it.
_CONNECT_THREADS = 32
_GREET_THREADS = 4
MAX_PENDING_HELLOS = 256
_HELLO_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class GreeterSnapshot:
    """Handshakes under way: ``pending_hellos`` of workers that wait for our answer, ``answers`` of workers that have
    answered our hello; a copy."""

    pending_hellos: frozenset[Peer]
    answers: frozenset[Peer]


class Greeter:
    """Shakes hands for one worker. The callbacks are called from its threads and take the worker's lock themselves."""

    def __init__(
        self,
        card: WorkerCard,
        transport: Transport,
        post: Post,
        peers: Peers,
        memory: CacheMemory,
        compares_digests: bool,
        handshake_s: float,
        identity: bytes,
        on_connected: Callable[[str, list[Partner]], None],
        on_failed: Callable[[str, str], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._card = card
        self._transport = transport
        self._post = post
        self._peers = peers
        self._memory = memory
        self._compares_digests = compares_digests
        self._handshake_s = handshake_s
        self._identity = identity
        self._on_connected = on_connected
        self._on_failed = on_failed
        self._complain = Complaints(logger)
        self._connects = ThreadPoolExecutor(_CONNECT_THREADS, "tandem-connect", on_start)
        self._greets = ThreadPoolExecutor(_GREET_THREADS, "tandem-greet", on_start)
        self._lock = threading.Lock()
        self._connecting: set[str] = set()
        self._pending_hellos: set[Peer] = set()
        self._awaited: set[Peer] = set()
        self._answers: dict[Peer, str | None] = {}
        self._answered = threading.Condition(self._lock)

    def connect(self, engine: EngineAddress) -> None:
        """Shake hands with a producer engine in the background; a second call while one is under way does nothing."""
        with self._lock:
            if engine.incarnation in self._connecting:
                return
            self._connecting.add(engine.incarnation)
        self._submit(self._connects, self._connect, engine)

    @property
    def busy(self) -> bool:
        """Whether a handshake that we have begun waits for answers."""
        return bool(self._connecting)

    def greeted(self, sender: Peer, message: Hello) -> None:
        """A consumer worker has said hello. In a flood, some are dropped: their senders will hear nothing."""
        with self._lock:
            if sender in self._pending_hellos:
                return
            full = len(self._pending_hellos) >= MAX_PENDING_HELLOS
            if not full:
                self._pending_hellos.add(sender)
        if full:
            self._complain("full", f"{MAX_PENDING_HELLOS} hellos wait for an answer; one of {sender} is dropped")
            return
        self._submit(self._greets, self._welcome, sender, message)

    def answered(self, sender: Peer, message: Welcome | Refused) -> None:
        """A producer worker has answered our hello, if there was one."""
        with self._answered:
            if sender not in self._awaited:
                return
            self._answers[sender] = message.reason if isinstance(message, Refused) else None
            self._answered.notify_all()

    def snapshot(self) -> GreeterSnapshot:
        """Return a copy of the state, for tests and diagnosis."""
        with self._lock:
            return GreeterSnapshot(frozenset(self._pending_hellos), frozenset(self._answers))

    def close(self) -> None:
        for pool in (self._connects, self._greets):
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., None], *arguments: object) -> None:
        # A pool that is shut down refuses work: this worker is being closed.
        with contextlib.suppress(RuntimeError):
            pool.submit(self._guarded, work, *arguments)

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """A bad peer never ends a thread silently."""
        try:
            work(*arguments)
        except TandemError as error:
            logger.warning("Tandem: first contact failed: %s", error)
        except Exception:
            logger.exception("Tandem: first contact failed unexpectedly")

    # ---- as a consumer -----------------------------------------------------------------------------------------

    def _connect(self, engine: EngineAddress) -> None:
        found: list[Partner] | None = None
        failure = ""
        # Its workers are being greeted until the machine knows them.
        with contextlib.ExitStack() as greetings:
            try:
                found = self._shake_hands(engine, greetings)
            except TandemError as error:
                # One that keeps blocks in quarantine is asked again every cancel_s.
                self._complain("connect", f"no connection with prefill engine {engine.incarnation}: {error}")
                failure = str(error)
            except Exception as error:
                logger.exception("Tandem: the handshake with prefill engine %s broke", engine.incarnation)
                failure = f"the handshake broke: {error!r}"
            # First, so that a request which comes from here on starts a handshake of its own.
            with self._lock:
                self._connecting.discard(engine.incarnation)
            if found is None:
                self._on_failed(engine.incarnation, failure)
            else:
                self._on_connected(engine.incarnation, found)

    def _shake_hands(self, engine: EngineAddress, greetings: contextlib.ExitStack) -> list[Partner]:
        deadline = time.monotonic() + self._handshake_s
        card = fetch_card(engine.host, engine.port, engine.incarnation, self._handshake_s, self._identity)
        for worker in card.workers:
            check_peers(worker, self._card)
        plans = self._plans(card)
        prove_plans(self._card.layout, list(plans.values()))
        refusals = self._say_hello(card, sorted(plans), deadline, greetings)
        if refusals:
            raise HandshakeError(f"it refused: {refusals[0]}")
        return [
            Partner(
                Peer(card.incarnation, rank),
                plan.shapes,
                plan.unit_bytes,
                self._target_digests(plan, card.workers[rank]),
                engine,
                card.workers[rank].process,
                liveness(card.workers[rank].process) is Liveness.ALIVE,
            )
            for rank, plan in plans.items()
        ]

    def _target_digests(self, plan: PairPlan, producer: WorkerCard) -> Callable[[], TransferDigest] | None:
        """What makes the digests of transfers from ``producer``; None where none are to be compared."""
        if not self._compares_digests:
            return None
        return digests(plan, self._memory.shared_with(producer.layout.place), End.TARGET)

    def _say_hello(
        self, engine: EngineCard, ranks: list[int], deadline: float, greetings: contextlib.ExitStack
    ) -> list[str]:
        """Say hello to these ranks and wait for all their answers: the reasons of those that refused."""
        hello = Hello(encode_worker_card(self._card))
        waiting = {Peer(engine.incarnation, rank) for rank in ranks}
        with self._lock:
            self._awaited |= waiting
        try:
            for rank in ranks:
                peer = Peer(engine.incarnation, rank)
                greetings.enter_context(self._peers.greeting(peer))
                self._transport.add_peer(engine.workers[rank].transport_metadata, agent_name(peer))
                self._post.send(peer, hello)
            while True:
                with self._answered:
                    within_s = min(_HELLO_AGAIN_S, deadline - time.monotonic())
                    self._answered.wait_for(lambda: waiting <= self._answers.keys(), within_s)
                    silent = waiting - self._answers.keys()
                    if not silent:
                        return [reason for peer in sorted(waiting, key=agent_name) if (reason := self._answers[peer])]
                if time.monotonic() >= deadline:
                    raise HandshakeError(f"its workers did not answer within {self._handshake_s:g} s")
                # A worker that is met by many at once drops hellos.
                for peer in silent:
                    self._post.send(peer, hello)
        finally:
            with self._lock:
                self._awaited -= waiting
                for peer in waiting:
                    self._answers.pop(peer, None)

    def _plans(self, engine: EngineCard) -> dict[int, PairPlan]:
        """What each producer rank that talks to this worker sends to it."""
        mine = self._card.layout
        ranks = [p for p, c in partners(engine.tp_size, mine.tp_size, mine.turns) if c == mine.tp_rank]
        return {rank: plan_pair(engine.workers[rank].layout, mine) for rank in ranks}

    # ---- as a producer -----------------------------------------------------------------------------------------

    def _welcome(self, sender: Peer, message: Hello) -> None:
        try:
            self._greet(sender, message)
        finally:
            with self._lock:
                self._pending_hellos.discard(sender)

    def _greet(self, sender: Peer, message: Hello) -> None:
        with contextlib.ExitStack() as greeting:
            try:
                card = decode_worker_card(message.card)
                if (card.incarnation, card.rank) != (sender.incarnation, sender.rank):
                    raise HandshakeError("the hello's card is another worker's")
                greeting.enter_context(self._peers.greeting(sender))
                self._transport.add_peer(card.transport_metadata, agent_name(sender))
            except TandemError as error:
                # Without its metadata the peer cannot be answered; it gives up after handshake_s.
                self._complain("hello", f"a hello of decode worker {agent_name(sender)[:80]!r} is unusable: {error}")
                return
            try:
                plan, consumer = self._plan_for(card)
            except TandemError as error:
                self._complain("refused", f"decode worker {agent_name(sender)[:80]!r} is refused: {error}")
                self._post.send(sender, Refused(str(error)))
                return
            self._peers.welcome(sender, card.layout.place, plan, consumer)
            self._post.send(sender, Welcome())

    def _plan_for(self, card: WorkerCard) -> tuple[PairPlan, Consumer]:
        """What this rank sends to a consumer worker. Raises TandemError where the two do not fit."""
        check_peers(self._card, card)
        mine, theirs = self._card.layout, card.layout
        pairs = partners(mine.tp_size, theirs.tp_size, mine.turns)
        ranks = frozenset(consumer for producer, consumer in pairs if producer == mine.tp_rank)
        plan = plan_pair(mine, theirs)
        source = digests(plan, self._memory.shared_with(theirs.place), End.SOURCE)
        return plan, Consumer(ranks, theirs.num_blocks, plan.shapes, source)
