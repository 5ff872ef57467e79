"""Both machines in every order of events: no state, of any interleaving of a small transfer, breaks a promise.

``make explore`` goes further: two by two ranks with a message lost, one doubled, and an ending each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from connectors.protocol.actions import Received
from connectors.protocol.consumer import Consumer
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Cancelled
from tests.campaigns.protocol.automata import Broken
from tests.campaigns.protocol.lists import quick, scenario
from tests.campaigns.protocol.search import explore
from tests.campaigns.protocol.transfers import NEVER, Scenario


@pytest.mark.parametrize("each", list(quick()), ids=lambda each: each.name)
def test_promises_hold(each: Scenario) -> None:
    """Right or refused in every state; from every state, everything ends and every block comes back."""
    found = explore(each)
    assert found.states > found.ends > 0


def test_without_faults_there_is_one_end() -> None:
    """Two by two ranks: thousands of ways, and all lead to the KV."""
    found = explore(scenario(2, 2, "plain"))
    assert found.ends == 1
    assert found.states > 4000


def answers_at_once(machine: Producer, peer: Any, cancel: Any, now: float) -> list[Any]:
    """Cancelled without waiting for writes in flight."""
    actions = ORIGINAL_CANCELLED(machine, peer, cancel, now)
    if actions:
        return actions
    from connectors.protocol.actions import Send

    return [Send(peer, Cancelled(cancel.transfer_id))]


ORIGINAL_CANCELLED = Producer._cancelled


def frees_after_a_deadline(machine: Consumer, now: float) -> list[Any]:
    """Quarantine that time alone ends."""
    actions = ORIGINAL_TICK(machine, now)
    for reception in list(machine._quarantine.values()):
        reception.writing.clear()
        actions += machine._end_if_over(reception)
    return actions


def never_frees(machine: Consumer, reception: Any) -> list[Any]:
    """Quarantine that nothing ends."""
    return [] if reception.stage.name == "QUARANTINE" else ORIGINAL_END(machine, reception)


ORIGINAL_END = Consumer._end_if_over


def waits_for_the_answer(machine: Consumer, reception: Any, now: float) -> list[Any]:
    """Blocks in quarantine, and nobody is told that the request cannot have them."""
    return [action for action in ORIGINAL_UNANSWERED(machine, reception, now) if not isinstance(action, Received)]


ORIGINAL_UNANSWERED = Consumer._unanswered


ORIGINAL_TICK = Consumer.tick


def never_forgets(machine: Producer, now: float) -> list[Any]:
    """A producer whose leases do not end."""
    return []


def forgets_numbers(machine: Producer, now: float) -> list[Any]:
    """A producer for which a late offer is a new one."""
    actions = ORIGINAL_PRODUCER_TICK(machine, now)
    machine._overtaken.clear()
    return actions


ORIGINAL_PRODUCER_TICK = Producer.tick


@pytest.mark.parametrize(
    ("machine", "method", "instead", "faults", "says"),
    [
        (Producer, "_cancelled", answers_at_once, {"abort": 1}, "while a write for it is under way"),
        (Producer, "preempted", lambda machine, request_id, now: [], {}, "was told ok, but"),
        (Producer, "tick", never_forgets, {"abort": 1}, "at the end prefill"),
        (Producer, "tick", forgets_numbers, {"abort": 1, "early": NEVER}, "a write or a comparison is under way"),
        (Consumer, "tick", frees_after_a_deadline, {"drop": 1, "abort": 1, "early": NEVER}, "have not answered"),
        (Consumer, "_end_if_over", never_frees, {"drop": 1, "abort": 1, "early": NEVER}, "at the end decode"),
        (Consumer, "_unanswered", waits_for_the_answer, {"drop": 1, "abort": 1, "early": NEVER}, "not in quarantine"),
        (Consumer, "tick", lambda machine, now: [], {"drop": 1}, "at the end decode"),
        (Consumer, "engine_lost", lambda machine, incarnation, reason, now: [], {"crash_prefill": 1}, "at the end"),
    ],
)
def test_broken_machines_are_found(
    monkeypatch: pytest.MonkeyPatch,
    machine: type,
    method: str,
    instead: Callable[..., list[Any]],
    faults: dict[str, Any],
    says: str,
) -> None:
    """Each of these mistakes breaks a promise in some interleaving, and the way there is told."""
    monkeypatch.setattr(machine, method, instead)
    legs = "preempted" if method == "preempted" else "plain"
    with pytest.raises(Broken, match=says) as caught:
        explore(scenario(1, 1, legs, **faults))
    assert "decode_starts" in str(caught.value)
