"""The cost of a round depends on open transfers, not on remembered ones: counted in bytecodes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.wire import Peer
from tests.protocol.scripts import SHAPES, ConsumerPlayer, Player, ProducerPlayer


def bytecodes(call: Callable[[], object]) -> int:
    """Return the number of bytecodes of a call."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, own = sys.gettrace(), inspect.currentframe()
    assert own
    own.f_trace_opcodes = True  # Python 3.12 counts none if no frame has asked before `settrace`
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def producer(ended: int) -> Player:
    """Return a producer with this number of ended transfers and one in progress."""
    player = ProducerPlayer()
    player.play("0 expect")
    for number in range(ended):
        player.play(f"0 expect r{number} t{number}\n0 held r{number}\n0 discard t{number} | sent r{number}")
    return player


def consumer(ended: int) -> Player:
    player = ConsumerPlayer()
    player.play("0 connected\n0 start r | offer 0 #1, offer 1 #1")
    for number in range(ended):
        list(player.answer(f"0 start r{number}"))
        player.play(f"0 fin 0 of=t{number}\n0 fin 1 of=t{number} | received r{number}")
    return player


def silent_peers(count: int) -> Player:
    """Return a producer that knows many consumer workers, one of which sends messages."""
    player = ProducerPlayer()
    for number in range(count):
        player.machine.welcome(Peer(f"engine-{number}", 0), ConsumerPeer(frozenset({0}), 100, SHAPES), 0.0)
    return player


@pytest.mark.parametrize("state", [producer, consumer, silent_peers])
def test_a_round(state: Callable[[int], Player]) -> None:
    few, many = state(10), state(200)
    assert bytecodes(lambda: few.machine.tick(0.5)) == bytecodes(lambda: many.machine.tick(0.5))


def test_ids_expire_all_the_same() -> None:
    """Those of transfers in progress do not."""
    player = producer(3)
    player.play("19.9 tick\n19.9 counts | 1 live, 3 remembered\n20 tick\n20 counts | 1 live")
    other = consumer(3)
    other.play("19 alive 0\n19 alive 1\n19.9 tick\n19.9 start r0 | failed r0\n20 tick\n20 start r t | failed r")
    assert list(other.answer("20 start r0")) == ["offer 0 t0 #5", "offer 1 t0 #5"]
