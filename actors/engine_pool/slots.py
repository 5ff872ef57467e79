"""Slots of one router on the engines of one role, granted in order of arrival.

A request that may not use the engines with free slots does not block later ones. A call with
several sequences needs one free slot and may exceed the engine's number; otherwise calls with one
sequence would always overtake it. The engine refuses calls when its slots are taken: this router
learns the load of other routers only from its replies. A replica here is an engine of
`discovery.py`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from actors.engine_pool.discovery import EngineReplica, rank
from actors.errors import OverloadedError

logger = logging.getLogger(__name__)

REFUSED_S = 0.05
"""Initial back-off in seconds for a full engine; doubles after each refused probe."""

MOST_REFUSED_S = 1.0

LOOK_AGAIN_S = 0.05
"""Interval in seconds at which waiting requests find new engines, and full ones after their back-
off.
"""

REMEMBERED_S = 5.0
"""Age in seconds from which the last `Accepted.ongoing` of an engine is ignored."""


@dataclass(eq=False)
class SlotWaiter:
    """A request, or a later prompt of a list (`part`), that waits for a slot."""

    avoid: AbstractSet[str]
    prefer: Sequence[str]
    sequences: int
    part: bool = False
    identity: str | None = None
    slot: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass
class FullReplica:
    """A replica believed full. One request at a time may probe it, from `ask_at` on; another one at
    once when an accepted call ends there.
    """

    ask_at: float
    wait_s: float = REFUSED_S
    asked: bool = False


@dataclass(frozen=True, slots=True)
class UsableReplicas:
    """Replicas that can grant a slot, with their ongoing sequences, also `full` ones to probe."""

    free: dict[str, int]
    full: dict[str, int]
    engines: Mapping[str, EngineReplica]


class SlotPool:
    """Pool of slots on the replicas that `look` returns, by replica id."""

    def __init__(self, look: Callable[[], Mapping[str, EngineReplica]]) -> None:
        self._look = look
        self._taken: Counter[str] = Counter()
        self._others: dict[str, tuple[int, float]] = {}
        self._full: dict[str, FullReplica] = {}
        self._leaving: set[str] = set()
        self._waiting: dict[SlotWaiter, None] = {}
        """Waiting requests in order of arrival."""
        self._looking: asyncio.Task[None] | None = None
        self._turn = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        return self._taken.total()

    def ongoing(self) -> dict[str, int]:
        """Return the known number of ongoing sequences of each replica that accepts calls: this
        router's, plus those of others if the replica accepted a call within REMEMBERED_S.
        """
        now = _now()
        return {name: self._ongoing(name, now) for name in self._look() if name not in self._leaving}

    def changed(self) -> None:
        """Forget stopped replicas, and grant slots on new ones, after a change of `look`."""
        here = self._look().keys()
        self._leaving &= here
        for known in (self._others, self._full):
            for name in known.keys() - here:
                del known[name]
        self._serve_waiting()

    def maybe_full(self, name: str) -> bool:
        return name in self._full

    def take_now(
        self,
        avoid: AbstractSet[str] = frozenset(),
        prefer: Sequence[str] = (),
        sequences: int = 1,
        identity: str | None = None,
    ) -> str | None:
        """Take slots for `sequences` on a replica outside `avoid`; None if the request must wait.

        Prefers the first free replica of `prefer`, else the least busy free one, else one that is
        believed full and may be probed. With `identity`, takes only replicas of this identity.
        """
        return None if self._waiting else self._grant(avoid, prefer, sequences, identity, self._usable())

    async def take(
        self,
        avoid: AbstractSet[str] = frozenset(),
        prefer: Sequence[str] = (),
        sequences: int = 1,
        part: bool = False,
        identity: str | None = None,
    ) -> str:
        """Take slots as `take_now` does; wait without a deadline.

        `part` marks a later prompt of a list, which does not count as waiting. Raises
        OverloadedError if as many requests wait as the replicas allow (`EngineReplica.queue`), but
        not for a `part` or without replicas.
        """
        if (name := self.take_now(avoid, prefer, sequences, identity)) is not None:
            return name
        waiting = SlotWaiter(avoid, prefer, sequences, part, identity)
        most = max((engine.queue for engine in self._look().values()), default=None)
        self._waiting[waiting] = None
        self._serve_waiting()  # earlier requests may wait for other engines
        try:
            counted = 0 if part else sum(not one.part for one in self._waiting)
            if not waiting.slot.done() and most is not None and counted > most:
                raise OverloadedError(
                    f"{counted - 1} requests are waiting for an engine, so the queue is full; retry later"
                )
            if self._looking is None:
                self._looking = asyncio.create_task(self._look_again(), name="looks-for-slots")
            return await waiting.slot
        except asyncio.CancelledError:
            if waiting.slot.done() and not waiting.slot.cancelled():
                self.give_back(waiting.slot.result(), sequences, served=False)
            raise
        finally:
            self._waiting.pop(waiting, None)
            if not self._waiting and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    def add(self, name: str, sequences: int) -> None:
        """Count slots that another engine uses for this router, also beyond the engine's number."""
        self._taken[name] += sequences

    def give_back(self, name: str, sequences: int = 1, served: bool = True) -> None:
        """Release the slots of a call, which the replica has `served` or not."""
        self._taken[name] -= sequences
        if not self._taken[name]:
            del self._taken[name]
        if (full := self._full.get(name)) is not None:
            full.asked = False
            full.ask_at = _now() if served else full.ask_at
        self._serve_waiting()

    def record_accepted(self, name: str, ongoing: int) -> None:
        """Record that a replica accepted a call and has `ongoing` sequences from all routers."""
        self._others[name] = (max(ongoing - self._taken[name], 0), _now())
        self._full.pop(name, None)
        self._serve_waiting()

    def record_full(self, name: str) -> None:
        now = _now()
        known = self._full.setdefault(name, FullReplica(now + REFUSED_S))
        if known.asked:  # else the call was sent before the replica was believed full
            known.asked = False
            known.wait_s = min(2 * known.wait_s, MOST_REFUSED_S)
            known.ask_at = now + known.wait_s

    def record_leaving(self, name: str) -> None:
        self._leaving.add(name)

    def _ongoing(self, name: str, now: float) -> int:
        others, said_at = self._others.get(name, (0, 0.0))
        return self._taken[name] + (others if now - said_at < REMEMBERED_S else 0)

    def _usable(self) -> UsableReplicas:
        # Serve's thread may replace the mapping of `look` at any time.
        usable, now = UsableReplicas({}, {}, self._look()), _now()
        for name in usable.engines:
            self._add_usable(usable, name, now)
        return usable

    def _add_usable(self, usable: UsableReplicas, name: str, now: float) -> None:
        slots = usable.engines[name].slots
        if name in self._leaving or self._taken[name] >= slots:
            return
        ongoing, full = self._ongoing(name, now), self._full.get(name)
        if full is None and ongoing < slots:
            usable.free[name] = ongoing
        elif full is None or (full.ask_at <= now and not full.asked):
            usable.full[name] = ongoing

    def _grant(
        self,
        avoid: AbstractSet[str],
        prefer: Sequence[str],
        sequences: int,
        identity: str | None,
        usable: UsableReplicas,
    ) -> str | None:
        """Take slots on the best replica of `usable`, and update it; None if no replica fits."""
        if identity is not None:
            avoid = avoid | {name for name, one in usable.engines.items() if one.identity != identity}
        for replicas in (usable.free, usable.full):
            if ranked := rank(replicas, self._turn + 1, avoid, prefer):
                break
        else:
            return None
        name, now = ranked[0], _now()
        self._turn += 1
        if replicas is usable.full:
            full = self._full.setdefault(name, FullReplica(now))
            full.ask_at, full.asked = now + full.wait_s, True
        self._taken[name] += sequences
        del replicas[name]
        self._add_usable(usable, name, now)
        return name

    def _serve_waiting(self) -> None:
        if not self._waiting:
            return
        usable = self._usable()
        for waiting in list(self._waiting):
            if not usable.free and not usable.full:
                break
            if waiting.slot.done():
                continue
            name = self._grant(waiting.avoid, waiting.prefer, waiting.sequences, waiting.identity, usable)
            if name is not None:
                waiting.slot.set_result(name)
                del self._waiting[waiting]

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            try:
                self._serve_waiting()
            except Exception:
                logger.exception("cannot grant slots to waiting requests; trying again")


def _now() -> float:
    return asyncio.get_running_loop().time()
