"""Visit every state of a scenario once, and check from each that everything ends."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from tests.campaigns.protocol.automata import Broken
from tests.campaigns.protocol.events import Events
from tests.campaigns.protocol.states import Draft, State, Step
from tests.campaigns.protocol.transfers import NEVER, Scenario


@dataclass(frozen=True)
class Found:
    """Result of an exploration: states, steps between them, final states."""

    states: int
    steps: int
    ends: int
    seconds: float


def explore(scenario: Scenario) -> Found:
    """Explore a scenario. Raises Broken with the path to the broken promise.

    In each state, the due events happen in some order without a further fault: the first due event
    or, if there is none, the first clock whose jump changes something. Once all states are known, a
    check proves that these steps lead to an end from everywhere: every wait ends.
    """
    started_at = time.monotonic()
    world = Events(scenario)
    first = world.first()
    index = {first: 0}
    states, parents, then = [first], array("I", [0]), array("I", [0])
    todo, steps, ends = [0], 0, 0
    while todo:
        at = todo.pop()
        settles = None
        try:
            for _, result, due in successors(world, states[at]):
                steps += 1
                number = index.get(result)
                if number is None:
                    number = index[result] = len(states)
                    states.append(result)
                    parents.append(at)
                    then.append(0)
                    todo.append(number)
                if settles is None and due and number != at:
                    settles = number
            if settles is None:
                ends += 1
                world.check_end(world.unpack(states[at]))
        except Broken as broken:
            raise Broken(f"{scenario.name}: {broken}\n" + "\n".join(way(world, states, parents, at))) from broken
        then[at] = at if settles is None else settles
    endless = first_endless(then)
    if endless is not None:
        raise Broken(f"{scenario.name}: this does not end\n" + "\n".join(way(world, states, parents, endless)))
    seconds = time.monotonic() - started_at
    return Found(len(states), steps, ends, seconds)


def successors(world: Events, state: State) -> Iterator[tuple[Step, State, bool]]:
    """Yield (event, the state after it, whether it happens without a fault)."""
    before = world.unpack(state)
    alone = world.alone(before)
    orderly = alone or list(world.orderly(before))
    early, left = before.budget, bool(orderly) and before.budget.early != NEVER
    if left:
        early = early._replace(early=early.early - 1)
    for steps, due, budget in (  # in the order in which they are due
        (orderly, True, before.budget),
        (() if alone else world.faults(before), False, before.budget),
        (() if orderly else world.at_last(before), True, before.budget),
        (world.jumps(before) if not alone and (not left or before.budget.early) else (), not left, early),
    ):
        for step in steps:
            draft = Draft(before.a[:], before.b[:], set(before.net), set(before.writes), budget)
            try:
                step[0](draft, *step[1])
            except Broken as broken:
                raise Broken(f"{described(step)}: {broken}") from broken
            yield step, world.pack(draft), due and step[0] != world.fault


def described(step: Step) -> str:
    method, arguments = step
    return " ".join([method.__name__, *(getattr(each, "__name__", str(each)) for each in arguments)])


def first_endless(then: array[int]) -> int | None:
    """Return a state from which ``then`` leads to a cycle, if any."""
    over = bytearray(len(then))
    for start in range(len(then)):
        path, at = [], start
        while not over[at]:
            if then[at] == at:
                over[at] = 1
                break
            over[at] = 2
            path.append(at)
            at = then[at]
            if over[at] == 2:
                return at
        for passed in path:
            over[passed] = 1
    return None


def way(world: Events, states: list[State], parents: array[int], at: int) -> list[str]:
    """Return the events from the first state on. Ranks may change names on the way."""
    labels: list[str] = []
    while at:
        before, target = parents[at], states[at]
        labels.append(next(described(step) for step, then, _ in successors(world, states[before]) if then == target))
        at = before
    return labels[::-1]
