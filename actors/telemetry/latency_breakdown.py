"""Latency breakdown: the parts of the time to a request's first token. Pure.

The interval goes from a request's arrival in the router to the first byte of its answer, on the
router's clock. An engine reports durations since the call arrived, on its own host's clock; clocks
of two hosts are never compared. The engine's durations are placed between the time at which the
router sent the call and the time of the answer; the rest is the network, half of it each way. So a
boundary between two parts is off by at most half of the network time, and the parts always sum to
the total.

Both legs run at once, so each moment belongs to the leg that the first token waits for:

    before prefill has computed the prompt      prefill's activity (unless decode has all KV already)
    after that, and while decode waits for KV   `transfer`: the part of the transfer that prefill did not hide
    otherwise                                   decode's activity
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from actors.request import EngineTimings

Part = Literal[
    "body",
    "router",
    "retries",
    "slot_wait",
    "hops",
    "frontend",
    "prefill_queue",
    "prefill",
    "transfer",
    "decode_queue",
    "first_step",
    "recompute",
    "generation",
    "unexplained",
]
"""What the first token waited for.

    body            upload of the request's body
    router          reading the request, deciding, writing the legs
    retries         attempts that failed before the one that answered
    slot_wait       a free slot on a replica of each role
    hops            network between router and engines, both ways
    frontend        vLLM's serving layer: template and tokenizer before, detokenizer and response after
    prefill_queue   prefill's scheduler
    prefill         computing the prompt (of a local request: on decode, with the first token)
    transfer        KV that had not arrived when the prompt was computed
    decode_queue    decode's scheduler: until blocks are free, and from the KV's arrival to the next step
    first_step      decode's first step
    recompute       decode's first step when the transfer failed and decode computed the prompt
    generation      the rest of an answer that is not streamed
    unexplained     an engine did not report its timings, or not in time
"""

PARTS: tuple[Part, ...] = get_args(Part)
"""All parts, in the order in which a request passes them."""


@dataclass(frozen=True)
class LegTimestamps:
    """Times of one leg on the router's clock, in seconds, and its engine's timings if reported."""

    sent_at: float
    answered_at: float
    timings: EngineTimings | None


@dataclass(frozen=True)
class RequestTimestamps:
    """Times of a request on the router's clock, in seconds. `decode.answered_at` is the first byte
    of the answer."""

    arrived_at: float
    read_at: float
    """The body has arrived."""
    tried_at: float
    """The first attempt begins."""
    retried_at: float
    """The attempt that answered begins."""
    slots_at: float
    """The legs have slots."""
    decode: LegTimestamps
    prefill: LegTimestamps | None
    """None for a local request; without timings if prefill had not answered by then."""
    streams: bool


@dataclass(frozen=True)
class Span:
    """One part of the first token's wait, from `begin_s` to `end_s` after the request's arrival."""

    part: Part
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class LatencyBreakdown:
    """The interval in `spans` without gap or overlap, in order; a part may occur more than once."""

    spans: tuple[Span, ...]

    @property
    def total_s(self) -> float:
        return self.spans[-1].end_s if self.spans else 0.0

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds of each part that occurs, in the order of `PARTS`; their sum is `total_s`."""
        found = dict.fromkeys(PARTS, 0.0)
        for span in self.spans:
            found[span.part] += span.end_s - span.begin_s
        return {part: seconds for part, seconds in found.items() if seconds > 0}


Chain = list[tuple[float, Part | None]]
"""Activity until each time, in order; None stands for decode's wait for KV."""


def break_down(timestamps: RequestTimestamps) -> LatencyBreakdown:
    """Return the breakdown of a request whose answer has started."""
    legs = [leg for leg in (timestamps.prefill, timestamps.decode) if leg is not None]
    before: Chain = [
        (timestamps.read_at, "body"),
        (timestamps.tried_at, "router"),
        (timestamps.retried_at, "retries"),
        (timestamps.slots_at, "slot_wait"),
        (min(leg.sent_at for leg in legs), "router"),
    ]
    waited_for: Part = "transfer"
    prefill: Chain = []
    if timestamps.prefill is not None:
        if timestamps.prefill.timings is None:
            waited_for = "unexplained"
        else:
            prefill = _prefill_chain(timestamps.prefill, timestamps.prefill.timings)
    start = timestamps.arrived_at
    spans = _partition(
        start,
        max(timestamps.decode.answered_at, start),
        _monotonic(before, start),
        _monotonic(prefill, start),
        _monotonic(_decode_chain(timestamps), start),
        waited_for,
    )
    return LatencyBreakdown(spans)


def _decode_chain(timestamps: RequestTimestamps) -> Chain:
    leg = timestamps.decode
    timings = leg.timings
    if timings is None:
        return [(leg.answered_at, "unexplained")]
    reached_at = _reached_at(leg, timings)
    step: Part = "prefill" if timestamps.prefill is None else "recompute" if timings.kv_failed else "first_step"
    chain: Chain = [(reached_at, "hops"), (reached_at + timings.queued_s, "frontend")]
    if timings.kv_asked_s is not None and timings.kv_ended_s is not None:
        chain += [(reached_at + timings.kv_asked_s, "decode_queue"), (reached_at + timings.kv_ended_s, None)]
    chain += [
        (reached_at + timings.scheduled_s, "decode_queue"),
        (reached_at + timings.first_token_s, step),
        (reached_at + timings.answered_s, "frontend" if timestamps.streams else "generation"),
        (leg.answered_at, "hops"),
    ]
    return chain


def _prefill_chain(leg: LegTimestamps, timings: EngineTimings) -> Chain:
    """Return the activity of prefill until the prompt is computed."""
    reached_at = _reached_at(leg, timings)
    return [
        (reached_at, "hops"),
        (reached_at + timings.queued_s, "frontend"),
        (reached_at + timings.scheduled_s, "prefill_queue"),
        (reached_at + timings.first_token_s, "prefill"),
    ]


def _reached_at(leg: LegTimestamps, timings: EngineTimings) -> float:
    """Return when the call arrived at its engine, taking half of the network time for the way
    there."""
    on_the_way_s = max(leg.answered_at - leg.sent_at - timings.answered_s, 0.0)
    return leg.sent_at + on_the_way_s / 2


def _partition(
    start: float, end: float, before: Chain, prefill: Chain, decode: Chain, waited_for: Part
) -> tuple[Span, ...]:
    sent_at = before[-1][0]
    waits = [until for until, part in decode if part is None]
    # Once all KV has arrived, the first token no longer waits for prefill, whose own token is
    # unused.
    prefill_to = min(prefill[-1][0], waits[-1]) if prefill and waits else start
    timestamps = {prefill_to, *(until for chain in (before, prefill, decode) for until, _ in chain)}
    spans: list[Span] = []
    for begin, stop in pairwise(sorted({start, end, *(mark for mark in timestamps if start < mark < end)})):
        chain = before if begin < sent_at else prefill if begin < prefill_to else decode
        part = _at(chain, begin) or waited_for
        begin_s = spans.pop().begin_s if spans and spans[-1].part == part else begin - start
        spans.append(Span(part, begin_s, stop - start))
    return tuple(spans)


def _monotonic(chain: Chain, start: float) -> Chain:
    """Return the chain with times that never decrease, as they might when a clock drifts."""
    latest = start
    return [(latest := max(latest, until), part) for until, part in chain]


def _at(chain: Chain, moment: float) -> Part | None:
    """Return the activity at `moment`; the last one when it is later than all."""
    index = bisect_right(chain, moment, key=lambda entry: entry[0])
    return chain[min(index, len(chain) - 1)][1]
