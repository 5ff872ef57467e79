"""States of the world as values, and as rows of small numbers: one row for equal states up to
rank names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tests.campaigns.protocol.automata import (
    Automaton,
    Cell,
    ExplorableConsumer,
    ExplorableProducer,
    Letters,
    Posted,
    Tag,
    call_consumer,
    call_producer,
    swap_wid,
)
from tests.campaigns.protocol.transfers import Budget, Scenario

DEAD = -1
"""Number of a machine that has died."""

WAITING, STARTED, GOT, FAILED = range(4)
UNASKED, QUEUED, DUE = range(3)
"""Transfer id of the first consumer rank, which asks for the start of the prompt."""
GARBAGE: Tag = ("torn",)


class A(NamedTuple):
    """A producer rank.

    ``done``: orders of its scheduler carried out; ``told``: consumer ranks whose deaths it knows.
    """

    machine: int
    done: int = 0
    sent: bool = False
    discards: bool = False
    told: int = 0


class B(NamedTuple):
    """A consumer rank.

    ``told``: producer ranks whose deaths it knows. ``queue``: whether it has sent AwaitStart, and
    has received Starting. ``may`` write: bits of the ranks with an Offer and without a later
    answer. ``memory[p]``: what producer rank p has written so far; ``verifying``: what is being
    compared. ``kept``: the request has failed, and its blocks are in quarantine.
    """

    machine: int
    phase: int = WAITING
    queue: int = UNASKED
    aborts: bool = False
    told: int = 0
    may: int = 0
    connecting: bool = False
    kept: bool = False
    memory: tuple[tuple[tuple[Cell, Tag], ...], ...] = ()
    verifying: tuple[Any, ...] = ()

    @property
    def listens(self) -> bool:
        """Return whether the engine is alive and its blocks may still receive writes."""
        return self.machine != DEAD and (self.phase <= STARTED or self.kept)


class InFlight(NamedTuple):
    """A write.

    ``torn`` once its source has changed. A write that ``hangs`` ends when only clocks are due. A
    ``failed`` write was reported as failed to its producer, and may reach the consumer while the
    producer lives.
    """

    rank: int
    posted: int
    torn: bool = False
    hangs: bool = False
    failed: bool = False


Letter = tuple[bool, int, int, int]
"""(to a consumer, receiving rank, sending rank, number)"""

State = tuple[int, ...]
"""Numbers of: every A, every B, the network, the writes, the budget."""


class Table:
    """Map of values to consecutive numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.values: list[Any] = []

    def __call__(self, value: Any) -> int:
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = len(self.values)
            self.values.append(value)
        return number


@dataclass(slots=True)
class Draft:
    """A state being changed.

    ``refuses``: the transport refuses the next message of a decode rank in this step.
    """

    a: list[A]
    b: list[B]
    net: set[Letter]
    writes: set[InFlight]
    budget: Budget
    refuses: bool = False

    @property
    def prefills(self) -> list[int]:
        """The producer ranks that live."""
        return [p for p, a in enumerate(self.a) if a.machine != DEAD]

    @property
    def decodes(self) -> list[int]:
        """The consumer ranks that live."""
        return [c for c, b in enumerate(self.b) if b.machine != DEAD]

    def set_a(self, p: int, **values: Any) -> None:
        self.a[p] = self.a[p]._replace(**values)

    def set_b(self, c: int, **values: Any) -> None:
        self.b[c] = self.b[c]._replace(**values)

    def drop_letters(self, to_consumer: bool, rank: int) -> None:
        self.net = {letter for letter in self.net if letter[:2] != (to_consumer, rank)}


Step = tuple[Callable[..., None], tuple[Any, ...]]
"""A method of the world that changes a draft, and its arguments."""


class States:
    """All known states of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.producer_tp, self.consumer_tp = scenario.producer_tp, scenario.consumer_tp
        self.letters = Letters()
        self.memories = [*scenario.memories, {}]
        self.producers = Automaton(
            lambda machine, event: call_producer(machine, event, self.letters, self.memories[event[2]]),
            ExplorableProducer.key,
        )
        self.consumers = Automaton(
            lambda machine, event: call_consumer(machine, event, self.letters), ExplorableConsumer.key
        )
        self.posted = Table()
        self.a, self.b, self.nets, self.write_sets, self.budgets = Table(), Table(), Table(), Table(), Table()
        self._swap_a, self._swap_b = cache(self._swapped_a), cache(self._swapped_b)
        self._swap_net, self._swap_writes = cache(self._swapped_net), cache(self._swapped_writes)

    def first(self) -> State:
        scenario = self.scenario
        a, b = A(self.producers.number(scenario.producer())), B(self.consumers.number(scenario.consumer()))
        empty = b._replace(memory=((),) * self.producer_tp)
        return self.pack(Draft([a] * self.producer_tp, [empty] * self.consumer_tp, set(), set(), scenario.budget))

    # ---- states as values -----------------------------------------------------------------------

    def unpack(self, state: State) -> Draft:
        p, c = self.producer_tp, self.consumer_tp
        return Draft(
            [self.a.values[n] for n in state[:p]],
            [self.b.values[n] for n in state[p : p + c]],
            set(self.nets.values[state[-3]]),
            set(self.write_sets.values[state[-2]]),
            self.budgets.values[state[-1]],
        )

    def pack(self, draft: Draft) -> State:
        return self.least(
            (
                *map(self.a, draft.a),
                *map(self.b, draft.b),
                self.nets(frozenset(draft.net)),
                self.write_sets(frozenset(draft.writes)),
                self.budgets(draft.budget),
            )
        )

    def least(self, state: State) -> State:
        """Return one state for all that differ in the names of ranks only: no machine depends on
        its rank.

        If requests are queued, the first ranks of either engine are the ones that exchange messages
        about it.
        """
        if self.scenario.queued:
            return state
        images = [state]
        if self.producer_tp == 2:
            images += [self.swap_producers(image) for image in images]
        if self.consumer_tp == 2:
            images += [self.swap_consumers(image) for image in images]
        return min(images)

    def swap_producers(self, state: State) -> State:
        a0, a1, *bs, net, writes, budget = state
        return (a1, a0, *map(self._swap_b, bs), self._swap_net(net, False), self._swap_writes(writes, False), budget)

    def swap_consumers(self, state: State) -> State:
        *as_, b0, b1, net, writes, budget = state
        return (*map(self._swap_a, as_), b1, b0, self._swap_net(net, True), self._swap_writes(writes, True), budget)

    def _swapped_a(self, number: int) -> int:
        a = self.a.values[number]
        machine = (
            a.machine if a.machine == DEAD else self.producers.derive(a.machine, ExplorableProducer.swap_consumers)
        )
        return self.a(a._replace(machine=machine, told=swap_bits(a.told)))

    def _swapped_b(self, number: int) -> int:
        b = self.b.values[number]
        machine = (
            b.machine if b.machine == DEAD else self.consumers.derive(b.machine, ExplorableConsumer.swap_producers)
        )
        verifying = tuple(sorted((1 - p, *rest) for p, *rest in b.verifying))
        return self.b(
            b._replace(
                machine=machine,
                told=swap_bits(b.told),
                may=swap_bits(b.may),
                memory=b.memory[::-1],
                verifying=verifying,
            )
        )

    def _swapped_net(self, number: int, of_consumers: bool) -> int:
        return self.nets(
            frozenset(
                (to, 1 - at if to is of_consumers else at, by if to is of_consumers else 1 - by, letter)
                for to, at, by, letter in self.nets.values[number]
            )
        )

    def _swapped_writes(self, number: int, of_consumers: bool) -> int:
        found = []
        for write in self.write_sets.values[number]:
            if of_consumers:
                posted: Posted = self.posted.values[write.posted]
                other = Posted(swap_wid(posted.wid), 1 - posted.consumer, posted.cells)
                found.append(write._replace(posted=self.posted(other)))
            else:
                found.append(write._replace(rank=1 - write.rank))
        return self.write_sets(frozenset(found))


def swap_bits(mask: int) -> int:
    return (mask & 1) << 1 | mask >> 1 & 1
