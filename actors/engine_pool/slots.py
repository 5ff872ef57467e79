"""A router's slots with the engines of one role: who is free, and who waits for one first come first served.

A slot is the right to make one call. An engine has a limit of its own and refuses what is beyond it: there may be
other routers, which this one only knows from what the engine has said.
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
"""How long an engine that has refused a call for want of slots is left alone; each time again, twice as long."""

MOST_REFUSED_S = 1.0

LOOK_AGAIN_S = 0.05
"""Between two looks for new engines, and for those that have refused, while requests wait."""

REMEMBERED_S = 5.0
"""How long an engine is taken to have as many calls of other routers as it said."""


@dataclass(eq=False)
class SlotWaiter:
    """A request that waits for a slot, and where it wants it."""

    avoid: AbstractSet[str]
    prefer: Sequence[str]
    slot: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass
class FullReplica:
    """An engine whose slots are taken, as far as is known here: of all requests one may ask it, now and then."""

    ask_at: float
    wait_s: float = REFUSED_S
    asked: bool = False
    """A request is there now, and has no answer yet."""


@dataclass(frozen=True, slots=True)
class SlotPoolSnapshot:
    """Ids of the engines that something is known of; a copy.

    `loaded` by other routers, `full` as far as is known, `leaving` for good.
    """

    loaded: frozenset[str]
    full: frozenset[str]
    leaving: frozenset[str]


class SlotPool:
    """`look` tells which engines there are, by replica id."""

    def __init__(self, look: Callable[[], Mapping[str, EngineReplica]]) -> None:
        self._look = look
        self._taken: Counter[str] = Counter()
        self._others: dict[str, tuple[int, float]] = {}
        self._full: dict[str, FullReplica] = {}
        self._leaving: set[str] = set()
        self._waiting: list[SlotWaiter] = []
        self._looking: asyncio.Task[None] | None = None
        self._turn = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Slots that are with callers."""
        return self._taken.total()

    def snapshot(self) -> SlotPoolSnapshot:
        """Return which engines something is known of now."""
        return SlotPoolSnapshot(frozenset(self._others), frozenset(self._full), frozenset(self._leaving))

    def ongoing(self) -> dict[str, int]:
        """For each engine that takes calls, how many it has, as far as is known here."""
        return {name: self._ongoing(name) for name in self._look() if name not in self._leaving}

    def maybe_full(self, name: str) -> bool:
        """Whether an engine may well have no slot, although one was given."""
        return name in self._full

    async def take(self, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = ()) -> str:
        """A slot with an engine that is not one to `avoid`; to be given back. Waits for it until cancelled.

        Raises OverloadedError where as many wait as may.
        """
        waiting = SlotWaiter(avoid, prefer)
        if not self._waiting and self._grant(waiting):
            return waiting.slot.result()
        most = max((engine.queue for engine in self._look().values()), default=None)
        self._waiting.append(waiting)
        self._serve_waiting()  # those before it may wait for other engines
        try:
            if not waiting.slot.done() and most is not None and len(self._waiting) > most:
                raise OverloadedError(f"{len(self._waiting) - 1} requests wait for an engine, which is the limit")
            if self._looking is None:
                self._looking = asyncio.create_task(self._look_again(), name="looks-for-slots")
            return await waiting.slot
        except asyncio.CancelledError:
            if waiting.slot.done() and not waiting.slot.cancelled():
                self.give_back(waiting.slot.result(), served=False)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            if not self._waiting and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    def give_back(self, name: str, served: bool = True) -> None:
        """The call has ended; or was not `served`: it was not made, or the engine did not take it."""
        self._taken[name] -= 1
        if not self._taken[name]:
            del self._taken[name]
        if (full := self._full.get(name)) is not None:
            full.asked = False
            full.ask_at = _now() if served else full.ask_at
        self._serve_waiting()

    def heard(self, name: str, ongoing: int) -> None:
        """An engine has taken a call, and has so many now."""
        self._others[name] = (max(ongoing - self._taken[name], 0), _now())
        self._full.pop(name, None)
        self._serve_waiting()

    def full(self, name: str) -> None:
        """An engine has refused a call for want of slots."""
        now = _now()
        known = self._full.setdefault(name, FullReplica(now + REFUSED_S))
        if known.asked:  # else this call was on its way with others
            known.asked = False
            known.wait_s = min(2 * known.wait_s, MOST_REFUSED_S)
            known.ask_at = now + known.wait_s

    def leaving(self, name: str) -> None:
        """An engine takes no more calls, ever."""
        self._leaving.add(name)

    def _ongoing(self, name: str) -> int:
        others, said_at = self._others.get(name, (0, 0.0))
        return self._taken[name] + (others if _now() - said_at < REMEMBERED_S else 0)

    def _grant(self, waiting: SlotWaiter) -> bool:
        self._forget()
        engines, now = self._look(), _now()
        self._turn += 1
        ranked = rank(self.ongoing(), self._turn, waiting.avoid, waiting.prefer)
        ranked = [name for name in ranked if self._taken[name] < engines[name].slots]
        for name in ranked:
            if name not in self._full and self._ongoing(name) < engines[name].slots:
                return self._give(waiting, name)
        for name in ranked:
            full = self._full.setdefault(name, FullReplica(now))
            if full.ask_at <= now and not full.asked:
                full.ask_at, full.asked = now + full.wait_s, True
                return self._give(waiting, name)
        return False

    def _give(self, waiting: SlotWaiter, name: str) -> bool:
        self._taken[name] += 1
        waiting.slot.set_result(name)
        return True

    def _serve_waiting(self) -> None:
        for waiting in [one for one in self._waiting if not one.slot.done()]:
            if self._grant(waiting):
                self._waiting.remove(waiting)

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            try:
                self._serve_waiting()
            except Exception:
                logger.exception("cannot look for slots; trying again")

    def _forget(self) -> None:
        """What is known of engines that are gone."""
        here = self._look().keys()
        self._leaving &= here
        for known in (self._others, self._full):
            for name in known.keys() - here:
                del known[name]


def _now() -> float:
    return asyncio.get_running_loop().time()
