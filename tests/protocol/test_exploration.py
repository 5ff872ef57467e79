"""Both machines in every order of events: no state of a small transfer breaks a promise.

The campaign ``explore`` covers more: two by two ranks with a message lost, one duplicated, and an
ending each.
"""

from __future__ import annotations

from typing import Any

import pytest

from connectors.protocol.actions import ConsumerAction, ProducerAction, Received, Send
from connectors.protocol.wire import Cancel, Cancelled, Peer
from tests.campaigns.protocol import transfers
from tests.campaigns.protocol.automata import Broken, ExplorableConsumer, ExplorableProducer
from tests.campaigns.protocol.lists import quick, scenario
from tests.campaigns.protocol.search import explore
from tests.campaigns.protocol.transfers import NEVER, Scenario


@pytest.mark.parametrize("each", list(quick()), ids=lambda each: each.name)
def test_promises_hold(each: Scenario) -> None:
    """Right or refused in every state; from every state, everything ends and all blocks are
    released.
    """
    found = explore(each)
    assert found.states > found.ends > 0


def test_without_faults_there_is_one_end() -> None:
    """Two by two ranks: all of thousands of interleavings deliver the KV."""
    found = explore(scenario(2, 2, "plain"))
    assert found.ends == 1
    assert found.states > 4000


class AnswersAtOnce(ExplorableProducer):
    """Cancelled without waiting for writes in flight."""

    def _cancelled(self, peer: Peer, cancel: Cancel, now: float) -> list[ProducerAction]:
        return super()._cancelled(peer, cancel, now) or [Send(peer, Cancelled(cancel.transfer_id))]


class IgnoresPreemption(ExplorableProducer):
    """A producer that continues with the former blocks of a preempted request."""

    def preempted(self, request_id: str, now: float) -> list[ProducerAction]:
        return []

    def fenced(self, request_id: str, now: float) -> list[ProducerAction]:
        return []


class IgnoresTheFence(ExplorableProducer):
    """A producer that sends Fin for writes which read blocks of another request."""

    def fenced(self, request_id: str, now: float) -> list[ProducerAction]:
        self._by_request[request_id].computed_tokens = 0
        return []


class NeverExpires(ExplorableProducer):
    """A producer whose leases do not end."""

    def tick(self, now: float) -> list[ProducerAction]:
        return []


class FreesAfterADeadline(ExplorableConsumer):
    """A quarantine that a deadline ends."""

    def tick(self, now: float) -> list[ConsumerAction]:
        actions = super().tick(now)
        for reception in list(self._quarantine.values()):
            reception.writing.clear()
            actions += self._end_if_over(reception, now)
        return actions


class WaitsForTheAnswer(ExplorableConsumer):
    """Blocks in quarantine without a report to the request."""

    def _unanswered(self, reception: Any, now: float) -> list[ConsumerAction]:
        return [action for action in super()._unanswered(reception, now) if not isinstance(action, Received)]


class IgnoresDeaths(ExplorableConsumer):
    """A consumer that treats a dead worker as a silent one."""

    def worker_lost(self, peer: Peer, reason: str, now: float) -> list[ConsumerAction]:
        return []


QUARANTINED: dict[str, Any] = {"drop": 1, "abort": 1, "early": NEVER}


@pytest.mark.parametrize(
    ("machine", "legs", "faults", "says"),
    [
        (AnswersAtOnce, "plain", {"abort": 1}, "while a write for it is in flight"),
        (IgnoresPreemption, "preempted", {}, "was told ok, but"),
        (IgnoresTheFence, "preempted", {}, "'torn'"),
        (NeverExpires, "plain", {"abort": 1}, "at the end prefill"),
        (FreesAfterADeadline, "plain", QUARANTINED, "have not answered"),
        (WaitsForTheAnswer, "plain", QUARANTINED, "not in quarantine"),
        (IgnoresDeaths, "plain", {"crash_prefill": 1}, "at the end decode"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_broken_machines_are_found(
    monkeypatch: pytest.MonkeyPatch, machine: type, legs: str, faults: dict[str, Any], says: str
) -> None:
    """Each of these mistakes breaks a promise in some interleaving, and the path to it is
    reported.
    """
    base = ExplorableProducer if issubclass(machine, ExplorableProducer) else ExplorableConsumer
    monkeypatch.setattr(transfers, base.__name__, machine)
    with pytest.raises(Broken, match=says) as caught:
        explore(scenario(1, 1, legs, **faults))
    assert "decode_starts" in str(caught.value)
