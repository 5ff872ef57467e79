"""Engines of one role, and one router's slots on them, granted by priority, then order of arrival.

A request that cannot use the free slots does not block later requests; one that needs more KV than
is free reserves one engine. Requests that would wait too long are refused at once
(`actors/policy/admission.py`). A call with several sequences needs one free slot and may exceed the
engine's slots; otherwise calls with one sequence would always overtake it. Routers know each
other's load only from an engine's replies, so an engine refuses calls when its slots are taken. A
replica here is an `EngineReplica`.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from actors.errors import OverloadedError
from actors.policy.admission import KvCache, Returns, ServiceRate
from actors.policy.prefixes import EngineStore
from actors.request import ProducerAddress
from actors.rpc.address import RpcAddress

logger = logging.getLogger(__name__)

REFUSED_S = 0.05
"""Initial back-off in seconds for a full engine; doubles after each refused probe."""

MOST_REFUSED_S = 1.0

LOOK_AGAIN_S = 0.05
"""Interval in seconds at which the pool looks for new engines, and for full ones to probe."""

REMEMBERED_S = 5.0
"""Maximum age in seconds of an engine's last `Accepted.ongoing`; older values are ignored."""


@dataclass(frozen=True)
class EngineReplica:
    """A running engine: a Serve replica, or one of its data-parallel ranks (docs/decisions/0047).

    ``slots``     number of ongoing sequences at which the engine refuses further calls
    ``queue``     number of requests that may wait in one router for engines of its role
    ``metadata``  from `replica_metadata`, and `producer` of a prefill engine
    ``replica``   id of the replica; its ranks end together
    ``drained``   whether an operator drains the engine: it refuses all calls
    """

    address: RpcAddress
    slots: int
    queue: int
    metadata: Mapping[str, Any]
    replica: str
    rank: int = 0
    drained: bool = False

    @cached_property
    def store(self) -> EngineStore | None:
        described = self.metadata.get("store")
        return None if described is None else EngineStore(*(described[name] for name in EngineStore._fields))

    @cached_property
    def kv_cache(self) -> KvCache | None:
        tokens, described = self.metadata.get("kv_tokens"), self.metadata.get("kv_cache")
        if not tokens or not described:
            return None
        return KvCache(tokens, described["blocks"], tuple((each, kept) for each, kept in described["groups"]))

    @cached_property
    def producer(self) -> ProducerAddress:
        """Address of a prefill engine's KV."""
        return msgspec.convert(self.metadata["producer"], ProducerAddress)

    @cached_property
    def identity(self) -> str:
        """Digest of what engines must share to exchange KV or to continue each other's streams
        (`engine_identity` in `connectors/protocol/agent_metadata.py`).
        """
        return str(self.metadata.get("identity", ""))

    @cached_property
    def frontend(self) -> str:
        """Digest of what turns a request into prompt and parameters (`VllmEngine.start`)."""
        return str(self.metadata.get("frontend", ""))

    @cached_property
    def calls_prefill(self) -> bool:
        """True if the engine takes a `PrefillOrder`; an engine of an earlier release ignores it."""
        return int(self.metadata.get("version", 1)) > 1


@dataclass
class Slot:
    """Slots for one call of `sequences` sequences on one engine, whose id is `replica_id`."""

    replica_id: str
    engine: EngineReplica
    sequences: int = 1
    maybe_full: bool = False
    """True if the router believes the engine full: other routers may hold its slots."""
    served: bool = False
    """Whether the engine has accepted the call."""
    tokens: int = 0
    """Committed tokens of the engine's KV cache."""


class SlotRequest(NamedTuple):
    """Request for slots for `sequences` sequences on one replica.

    Takes the first free replica of `prefer`, else the least busy free one, else one that is
    believed full and may be probed.

    ``avoid``     replicas to exclude
    ``identity``  required identity of the replica; None: any
    ``part``      whether this is a later prompt of a list, which does not count towards the queue
    ``tokens``    tokens of KV to commit: prompt and expected answer
    ``priority``  requests with a lower value are served first, as in vLLM
    ``wait_s``    longest estimated wait in seconds; beyond it the request is refused
    ``continues`` whether a stream continues: it waits neither for KV nor behind requests that have
                  not begun
    """

    avoid: AbstractSet[str] = frozenset()
    prefer: Sequence[str] = ()
    sequences: int = 1
    identity: str | None = None
    part: bool = False
    tokens: int = 0
    priority: int = 0
    wait_s: float = math.inf
    continues: bool = False

    @property
    def turn(self) -> tuple[bool, int]:
        """Sort key of waiting requests, before the order of arrival."""
        return not self.continues, self.priority

    @property
    def waits_for_kv(self) -> bool:
        return self.tokens > 0 and not self.continues


ANY = SlotRequest()


@dataclass
class FullReplica:
    """A replica believed full. One request at a time may probe it, from `ask_at` on. When a
    served call ends there, the next probe may follow at once.
    """

    ask_at: float
    wait_s: float = REFUSED_S
    asked: bool = False


@dataclass(frozen=True, slots=True)
class UsableReplicas:
    """Replicas that can grant a slot, with their ongoing sequences, also `full` ones to probe.

    ``kept``  replicas whose KV a waiting request will need
    """

    free: dict[str, int]
    full: dict[str, int]
    engines: Mapping[str, EngineReplica]
    kept: set[str]


class SlotPool:
    """Pool of slots on the replicas that `look` returns, by replica id."""

    def __init__(self, look: Callable[[], Mapping[str, EngineReplica]]) -> None:
        self._look = look
        self._taken: Counter[str] = Counter()
        self._committed: Counter[str] = Counter()
        """Tokens of KV that calls of this router hold or may still need, by engine."""
        self._rate = ServiceRate()
        self.returns = Returns()
        self._others: dict[str, tuple[int, float]] = {}
        self._full: dict[str, FullReplica] = {}
        self._leaving: set[str] = set()
        self._waiting: dict[asyncio.Future[Slot], SlotRequest] = {}
        """Waiting requests in order of `SlotRequest.turn`, then of arrival."""
        self._looking: asyncio.Task[None] | None = None
        self._turn = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        return self._taken.total()

    def accepting(self) -> dict[str, EngineReplica]:
        """Return the replicas that accept calls."""
        return {name: one for name, one in self._look().items() if name not in self._leaving and not one.drained}

    def ongoing(self) -> dict[str, int]:
        """Return the known number of ongoing sequences of each replica that accepts calls: this
        router's, plus those of others if the replica accepted a call within REMEMBERED_S.
        """
        now = _now()
        return {name: self._ongoing(name, now) for name in self.accepting()}

    def full(self) -> set[str]:
        """Return the replicas on which a request can take no slot now."""
        usable = self._usable()
        return usable.engines.keys() - usable.free.keys() - usable.full.keys()

    def take_now(self, wanted: SlotRequest = ANY) -> Slot | None:
        """Take slots on a replica; None if the request must wait. Forget stopped replicas."""
        here = self._look().keys()
        self._leaving &= here
        for known in (self._others, self._full):
            for name in known.keys() - here:
                del known[name]
        usable = self._usable()
        self._serve_waiting(usable, wanted)
        return self._grant(wanted, usable)

    async def take(self, wanted: SlotRequest = ANY) -> Slot:
        """Take slots on a replica; wait without a deadline.

        Raises OverloadedError if the queue is full (`EngineReplica.queue`), or if the estimated
        wait is longer than `wanted.wait_s`. A `part`, and any request while there are no replicas,
        may always wait.
        """
        if (granted := self.take_now(wanted)) is not None:
            return granted
        self._refuse_late(wanted)
        slot: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        most = max((engine.queue for engine in self._look().values()), default=None)
        if not self._waiting:
            self._rate.observe(0, True, _now())
        last = next(reversed(self._waiting.values()), wanted)
        self._waiting[slot] = wanted
        if wanted.turn < last.turn:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda one: one[1].turn))
        try:
            counted = 0 if wanted.part else sum(not one.part for one in self._waiting.values())
            if most is not None and counted > most:
                raise OverloadedError(
                    f"{counted - 1} requests are waiting for an engine, so the queue is full; retry later"
                )
            if self._looking is None:
                self._looking = asyncio.create_task(self._look_again(), name="looks-for-slots")
            return await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.give_back(slot.result())
            raise
        finally:
            self._waiting.pop(slot, None)
            if not self._waiting:
                self._rate.observe(0, False, _now())
                self.returns.forget()
            if not self._waiting and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    def _refuse_late(self, wanted: SlotRequest) -> None:
        """Raise OverloadedError if the estimated wait for the slots is too long."""
        if wanted.wait_s == math.inf:
            return
        usable, now = self._usable(), _now()
        most = max((one.metadata.get("kv_tokens", 0) for one in usable.engines.values()), default=0)
        tokens = min(wanted.tokens, most or wanted.tokens)
        ahead = sum(one.tokens for one in self._waiting.values() if one.turn <= wanted.turn)
        own = tokens
        if not ahead:  # where a slot is free, only the KV that lacks must be released
            lacking = self._lacking_kv(usable, wanted, now)
            names = lacking.keys() - self._avoided(wanted, usable)
            own = min((tokens - lacking[name] for name in names), default=tokens)
        wait_s, work_s = self._rate.wait_s(ahead + own, now), self._rate.wait_s(tokens, now)
        if wait_s > wanted.wait_s:
            raise OverloadedError(
                f"the request would wait about {wait_s:.0f} s for an engine, too long for its deadline; retry later",
                self.returns.retry_s(work_s, wait_s - wanted.wait_s, now),
            )

    def give_back(self, slot: Slot) -> None:
        name = slot.replica_id
        self._taken[name] -= slot.sequences
        self._committed[name] -= slot.tokens
        if not self._taken[name]:
            del self._taken[name], self._committed[name]
        if (full := self._full.get(name)) is not None:
            full.asked = False
            full.ask_at = _now() if slot.served else full.ask_at
        self._serve_waiting()
        self._rate.observe(slot.tokens if slot.served else 0, bool(self._waiting), _now())

    def move(self, slot: Slot, name: str) -> None:
        """Move `slot` to engine `name`, which decode calls in place of the other one.

        The engine may then have more sequences than slots: it refuses the call if it is full.
        """
        self.give_back(slot)
        self._taken[name] += slot.sequences
        self._committed[name] += slot.tokens
        slot.replica_id, slot.served = name, False

    def record(self, slot: Slot, outcome: str, ongoing: int = 0) -> None:
        """Record what the engine of `slot` answered: `accepted`, `full` or `leaving`.

        ``ongoing``  number of its sequences from all routers, if it has accepted the call
        """
        name, now = slot.replica_id, _now()
        match outcome:
            case "accepted":
                slot.served = True
                self._others[name] = (max(ongoing - self._taken[name], 0), now)
                self._full.pop(name, None)
                self._serve_waiting()
            case "full":
                known = self._full.setdefault(name, FullReplica(now + REFUSED_S))
                if known.asked:  # else the call was sent before the replica was believed full
                    known.asked = False
                    known.wait_s = min(2 * known.wait_s, MOST_REFUSED_S)
                    known.ask_at = now + known.wait_s
            case "leaving":
                self._leaving.add(name)

    def _ongoing(self, name: str, now: float) -> int:
        others, said_at = self._others.get(name, (0, 0.0))
        return self._taken[name] + (others if now - said_at < REMEMBERED_S else 0)

    def _usable(self) -> UsableReplicas:
        # Serve's thread may replace the mapping of `look` at any time.
        usable, now = UsableReplicas({}, {}, self.accepting(), set()), _now()
        for name in usable.engines:
            self._add_usable(usable, name, now)
        return usable

    def _add_usable(self, usable: UsableReplicas, name: str, now: float) -> None:
        slots = usable.engines[name].slots
        if self._taken[name] >= slots:
            return
        ongoing, full = self._ongoing(name, now), self._full.get(name)
        if full is None and ongoing < slots:
            usable.free[name] = ongoing
        elif full is None or (full.ask_at <= now and not full.asked):
            usable.full[name] = ongoing

    def _grant(self, wanted: SlotRequest, usable: UsableReplicas) -> Slot | None:
        """Take slots on the best replica of `usable`, and update it; None if no replica fits."""
        avoid, now = self._avoided(wanted, usable), _now()
        lacking = self._lacking_kv(usable, wanted, now)
        for replicas in (usable.free, usable.full):
            if ranked := rank(replicas, self._turn + 1, avoid | lacking.keys(), wanted.prefer):
                break
        else:
            # Later requests that need less would otherwise overtake this one forever.
            if kept := max(sorted(lacking.keys() - avoid), key=lacking.__getitem__, default=None):
                usable.kept.add(kept)
            return None
        name = ranked[0]
        self._turn += 1
        if replicas is usable.full:
            full = self._full.setdefault(name, FullReplica(now))
            full.ask_at, full.asked = now + full.wait_s, True
        self._taken[name] += wanted.sequences
        self._committed[name] += wanted.tokens
        del replicas[name]
        self._add_usable(usable, name, now)
        return Slot(name, usable.engines[name], wanted.sequences, name in self._full, tokens=wanted.tokens)

    @staticmethod
    def _avoided(wanted: SlotRequest, usable: UsableReplicas) -> set[str]:
        """Return the replicas that `wanted` cannot use, or must leave to an earlier request."""
        avoid = {*wanted.avoid, *(usable.kept if wanted.waits_for_kv else ())}
        if wanted.identity is not None:
            avoid |= {name for name, one in usable.engines.items() if one.identity != wanted.identity}
        return avoid

    def _lacking_kv(self, usable: UsableReplicas, wanted: SlotRequest, now: float) -> dict[str, int]:
        """Return the free tokens of KV of each usable replica that has too few for `wanted`.

        Each sequence of another router is assumed to hold as much as one of this router's there. An
        idle replica has enough, and any for a sequence that no cache holds: vLLM refuses it.
        """
        lacking: dict[str, int] = {}
        if not wanted.waits_for_kv:
            return lacking
        for name in (*usable.free, *usable.full):
            taken, held = self._taken[name], self._committed[name]
            each = held // taken if taken else wanted.tokens // wanted.sequences
            held += (self._ongoing(name, now) - taken) * each
            most = usable.engines[name].metadata.get("kv_tokens", 0)  # 0: unknown
            if held and 0 < most < held + wanted.tokens and wanted.tokens <= most * wanted.sequences:
                lacking[name] = most - held
        return lacking

    def _serve_waiting(self, usable: UsableReplicas | None = None, until: SlotRequest | None = None) -> None:
        """Grant slots of `usable`; only to requests whose turn is not after that of `until`."""
        if not self._waiting:
            return
        usable = self._usable() if usable is None else usable
        for slot, wanted in list(self._waiting.items()):
            if (not usable.free and not usable.full) or (until is not None and wanted.turn > until.turn):
                break
            if not slot.done() and (granted := self._grant(wanted, usable)) is not None:
                slot.set_result(granted)
                del self._waiting[slot]

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            try:
                self._serve_waiting()
            except Exception:
                logger.exception("cannot grant slots to waiting requests; trying again")


def rank(
    ongoing: Mapping[str, int], turn: int, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = ()
) -> list[str]:
    """Return the engine ids in `ongoing` that are not in `avoid`, best first: those in `prefer`,
    then those with the fewest ongoing sequences, equal ones rotated by `turn`.
    """
    ranked = [name for name in prefer if name in ongoing and name not in avoid]
    names_left = sorted(ongoing.keys() - avoid - set(ranked), key=lambda name: (ongoing[name], name))
    for _, equals in groupby(names_left, key=ongoing.__getitem__):
        names = list(equals)
        first = turn % len(names)
        ranked += names[first:] + names[:first]
    return ranked


def _now() -> float:
    return asyncio.get_running_loop().time()
