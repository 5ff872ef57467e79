"""Explored scenarios: all in ``explore``, and those of half a minute in ``make test``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.campaigns.protocol.transfers import LAYER_WISE, NEVER, PLAIN, PREEMPTED, STARTS, Budget, Scenario

LEGS = {"plain": PLAIN, "preempted": PREEMPTED, "layer-wise": LAYER_WISE}
ENDINGS = ("abort", "leave", "discard", "crash_prefill", "crash_decode")
"""Ends of a request: decode's or prefill's is aborted, the router discards the transfer, an
engine dies.
"""


def quick() -> Iterator[Scenario]:
    """All sizes, with fewer simultaneous faults for larger ones.

    Between 1 and 1 ranks clocks jump at any time.
    """
    for legs in ("plain", "preempted"):
        yield scenario(1, 1, legs, early=NEVER, drop=1, double=1, fail=1)
        yield scenario(1, 1, legs, early=NEVER, integrity=True, drop=1, fail=1)
        for end in ENDINGS:
            yield scenario(1, 1, legs, early=NEVER, drop=1, double=1, **one(end))
    yield scenario(1, 1, "layer-wise", early=NEVER, integrity=True, drop=1)
    yield scenario(1, 1, "layer-wise", early=NEVER, abort=1)
    yield scenario(1, 1, "plain", early=NEVER, hang=1, drop=1)
    yield scenario(1, 1, "plain", early=NEVER, fail=1, drop=1, abort=1)
    yield scenario(1, 1, "plain", early=NEVER, fail=1, hang=1)
    yield scenario(1, 1, "plain", early=NEVER, unposted=1, drop=1, double=1)
    yield scenario(1, 1, "plain", early=NEVER, handshake=True, refuse=1, abort=1, drop=1)
    yield scenario(1, 1, "plain", early=NEVER, unsent=1, drop=1, abort=1)
    yield scenario(1, 1, "plain", early=NEVER, handshake=True, unsent=1, refuse=1, abort=1)
    yield scenario(1, 1, "plain", early=NEVER, deadlines={"lease_s": 2}, drop=1, double=1, abort=1)
    yield scenario(1, 1, "plain", early=NEVER, deadlines={"progress_s": 2, "alive_s": 1}, drop=1, double=1, abort=1)
    yield scenario(1, 1, "plain", queued=True, early=NEVER, drop=1, double=1)
    for end in ENDINGS:
        yield scenario(1, 1, "plain", queued=True, early=NEVER, drop=1, **one(end))
    yield scenario(1, 1, "plain", queued=True, early=NEVER, unsent=1, drop=1)
    yield scenario(1, 1, "plain", queued=True, early=NEVER, handshake=True, refuse=1, abort=1)
    for producer_tp, consumer_tp in ((1, 2), (2, 1)):
        for end in ENDINGS:
            yield scenario(producer_tp, consumer_tp, "plain", drop=1, double=1, **one(end))
            yield scenario(producer_tp, consumer_tp, "plain", queued=True, **one(end))
        yield scenario(producer_tp, consumer_tp, "plain", queued=True, drop=1)
        yield scenario(producer_tp, consumer_tp, "preempted", drop=1, double=1)
        yield scenario(producer_tp, consumer_tp, "plain", integrity=True, drop=1, fail=1)
        yield scenario(producer_tp, consumer_tp, "plain", hang=1)
        yield scenario(producer_tp, consumer_tp, "plain", fail=1, abort=1)
        yield scenario(producer_tp, consumer_tp, "plain", unposted=1)
        yield scenario(producer_tp, consumer_tp, "plain", unsent=1, drop=1)
    yield scenario(2, 1, "layer-wise", drop=1)
    yield scenario(2, 2, "plain", drop=1)


def thorough() -> Iterator[Scenario]:
    """Two by two ranks with a drop, a duplicate and an ending each; smaller sizes with early
    jumps of clocks.
    """
    yield scenario(1, 1, "layer-wise", early=NEVER, drop=1, double=1, fail=1)
    yield scenario(1, 2, "layer-wise", drop=1)
    yield scenario(2, 2, "plain", crash_prefill=1)
    yield scenario(1, 1, "layer-wise", early=NEVER, integrity=True, drop=1, fail=1)
    for end in ENDINGS:
        yield scenario(1, 1, "layer-wise", early=NEVER, drop=1, double=1, **one(end))
    for producer_tp, consumer_tp in ((1, 2), (2, 1)):
        for end in ENDINGS:
            yield scenario(producer_tp, consumer_tp, "plain", early=1, drop=1, double=1, **one(end))
            yield scenario(producer_tp, consumer_tp, "plain", integrity=True, drop=1, double=1, fail=1, **one(end))
            for legs in ("preempted", "layer-wise"):
                yield scenario(producer_tp, consumer_tp, legs, drop=1, double=legs == "preempted", **one(end))
        words: dict[str, Any] = {"words_to_prefill": True}
        yield scenario(producer_tp, consumer_tp, "plain", drop=1, double=1, crash_decode=1, **words)
        yield scenario(producer_tp, consumer_tp, "plain", handshake=True, refuse=1, abort=1, drop=1)
        yield scenario(producer_tp, consumer_tp, "plain", early=2, drop=1)
        for end in ENDINGS:
            yield scenario(producer_tp, consumer_tp, "plain", queued=True, drop=1, double=1, **one(end))
    yield scenario(2, 2, "plain", drop=1, double=1)
    for end in ("crash_prefill", "crash_decode", "leave", "discard", "abort"):
        yield scenario(2, 2, "plain", drop=1, double=1, **one(end))
    yield scenario(2, 2, "plain", integrity=True, drop=1)
    yield scenario(2, 2, "plain", integrity=True, fail=1)
    yield scenario(2, 2, "plain", hang=1)
    yield scenario(2, 2, "plain", fail=1)
    yield scenario(2, 2, "plain", unposted=1)
    yield scenario(2, 2, "plain", unsent=1, drop=1)
    yield scenario(2, 2, "plain", early=1)
    yield scenario(2, 2, "preempted", drop=1, double=1)
    yield scenario(2, 2, "layer-wise", drop=1, double=1)
    yield scenario(2, 2, "plain", integrity=True, drop=1, double=1)


def one(ending: str) -> dict[str, Any]:
    return {ending: 1}


def scenario(
    producer_tp: int,
    consumer_tp: int,
    legs: str,
    integrity: bool = False,
    handshake: bool = False,
    words_to_prefill: bool = False,
    queued: bool = False,
    deadlines: dict[str, float] | None = None,
    early: int = 0,
    **faults: Any,
) -> Scenario:
    told = [word.replace("_", " ") for word in faults]
    told += ["digests"] if integrity else []
    told += ["handshake"] if handshake else []
    told += ["prefill is told"] if words_to_prefill else []
    told += ["queued"] if queued else []
    told += [f"{name} {jumps}" for name, jumps in (deadlines or {}).items()]
    told += {0: [], NEVER: ["clocks jump at any time"]}.get(early, [f"{early} early jumps"])
    name = f"{producer_tp} x {consumer_tp} {legs}: {', '.join(told)}"
    budget = Budget(early=early, **faults)
    orders = LEGS[legs]
    return Scenario(
        name,
        producer_tp,
        consumer_tp,
        budget,
        (orders[0], (STARTS, {}), *orders[1:]) if queued else orders,
        integrity,
        handshake,
        words_to_prefill,
        queued,
        deadlines or {},
    )
