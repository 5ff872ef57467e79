"""Latency breakdown: divides a request's time to first byte into parts. Does no I/O.

The interval is on the router's clock. An engine reports durations since the call's arrival; the
clocks of two hosts are never compared. The engine's durations are centred between the times at
which the router sent the call and received the answer. The rest is network time, half of it each
way. A boundary between two parts is therefore off by at most half of the network time, and the
parts always sum to the total.

Both legs run at once. Each moment counts for the leg that the first token waits for:

    until prefill has computed the prompt    prefill's activity (unless decode needs no more KV)
    then, while decode waits for the KV      `transfer`
    otherwise                                decode's activity

If prefill has reported no timings, decode's wait for KV counts as `unexplained`.
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
    "store",
    "prefill_queue",
    "prefill",
    "transfer",
    "decode_queue",
    "first_step",
    "recompute",
    "generation",
    "unexplained",
]
"""Part of the time to first byte.

    body            upload of the request's body
    router          reading the request, routing it, sending the legs
    retries         failed attempts before the one that answered
    slot_wait       wait for a free slot on one replica of each role that serves the request
    hops            network between router and engines, both ways
    frontend        vLLM's serving layer: template and tokenizer, detokenizer and response
    store           lookup in the KV store, and reads of the objects found, before the first step
    prefill_queue   wait in prefill's scheduler
    prefill         computing the prompt; with the first token if one engine serves the request
    transfer        wait for KV after the prompt was computed
    decode_queue    wait in decode's scheduler, for blocks and for the next step
    first_step      decode's first step
    recompute       decode's computation after a failed transfer, up to the first token
    generation      the rest of an answer that is not streamed
    unexplained     time that no timings explain: an engine sent none, or not in time
"""

PARTS: tuple[Part, ...] = get_args(Part)
"""All parts, in the order in which a request normally reaches them."""


@dataclass(frozen=True)
class CallTimes:
    sent_at: float
    answered_at: float
    timings: EngineTimings | None

    @property
    def reached_at(self) -> float:
        """Estimated arrival of the call at its engine: half of the network time after `sent_at`."""
        if self.timings is None:
            return self.sent_at
        return self.sent_at + max(self.answered_at - self.sent_at - self.timings.answered_s, 0.0) / 2


@dataclass(frozen=True)
class RequestTimestamps:
    """Times of a request, in seconds of the router's monotonic clock.

    ``retried_at``  start of the attempt that answered
    ``decode``      leg that produced the first byte, also a leg of prefill if `by_prefill`
    ``prefill``     leg that computed the prompt for `decode`, without timings if it had not
                    answered; None if one engine did both
    """

    arrived_at: float
    read_at: float
    tried_at: float
    retried_at: float
    slots_at: float
    decode: CallTimes
    prefill: CallTimes | None
    streams: bool
    by_prefill: bool = False


@dataclass(frozen=True)
class Span:
    """Time during which `part` lasts: `begin_s` to `end_s` seconds after the request's arrival."""

    part: Part
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class LatencyBreakdown:
    """Consecutive spans from a request's arrival to its first byte. A part may occur repeatedly."""

    spans: tuple[Span, ...]

    @property
    def total_s(self) -> float:
        return self.spans[-1].end_s if self.spans else 0.0

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds of each part that occurs; their sum is `total_s`."""
        found = dict.fromkeys(PARTS, 0.0)
        for span in self.spans:
            found[span.part] += span.end_s - span.begin_s
        return {part: seconds for part, seconds in found.items() if seconds > 0}


Chain = list[tuple[float, Part | None]]
"""(end time, activity) in order; activity None is decode's wait for KV."""


def break_down(timestamps: RequestTimestamps) -> LatencyBreakdown:
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
    reached_at = leg.reached_at
    step: Part = "prefill" if timestamps.prefill is None else "recompute" if timings.kv_failed else "first_step"
    queue: Part = "prefill_queue" if timestamps.by_prefill else "decode_queue"
    chain: Chain = [(reached_at, "hops"), (reached_at + timings.queued_s, "frontend")]
    chain += _store_chain(reached_at, timings, queue)
    if timings.kv_asked_s is not None and timings.kv_ended_s is not None:
        chain += [(reached_at + timings.kv_asked_s, "decode_queue"), (reached_at + timings.kv_ended_s, None)]
    chain += [
        (reached_at + timings.scheduled_s, queue),
        (reached_at + timings.first_token_s, step),
        (reached_at + timings.answered_s, "frontend" if timestamps.streams else "generation"),
        (leg.answered_at, "hops"),
    ]
    return chain


def _prefill_chain(leg: CallTimes, timings: EngineTimings) -> Chain:
    reached_at = leg.reached_at
    return [
        (reached_at, "hops"),
        (reached_at + timings.queued_s, "frontend"),
        *_store_chain(reached_at, timings, "prefill_queue"),
        (reached_at + timings.scheduled_s, "prefill_queue"),
        (reached_at + timings.first_token_s, "prefill"),
    ]


def _store_chain(reached_at: float, timings: EngineTimings, queue: Part) -> Chain:
    if timings.store_asked_s is None or timings.store_ended_s is None:
        return []
    # A request that was preempted before its first token may fetch again after its first step.
    ended_s = min(timings.store_ended_s, timings.scheduled_s)
    return [(reached_at + min(timings.store_asked_s, ended_s), queue), (reached_at + ended_s, "store")]


def _partition(
    start: float, end: float, before: Chain, prefill: Chain, decode: Chain, waited_for: Part
) -> tuple[Span, ...]:
    sent_at = before[-1][0]
    waits = [until for until, part in decode if part is None]
    # Once all KV has arrived, the first token no longer waits for prefill, whose token is unused.
    prefill_to = min(prefill[-1][0], waits[-1]) if prefill and waits else start
    timestamps = {prefill_to, *(until for chain in (before, prefill, decode) for until, _ in chain)}
    spans: list[Span] = []
    for begin, stop in pairwise(sorted({start, end, *(moment for moment in timestamps if start < moment < end)})):
        chain = before if begin < sent_at else prefill if begin < prefill_to else decode
        part = _at(chain, begin) or waited_for
        begin_s = spans.pop().begin_s if spans and spans[-1].part == part else begin - start
        spans.append(Span(part, begin_s, stop - start))
    return tuple(spans)


def _monotonic(chain: Chain, start: float) -> Chain:
    """Return the chain with non-decreasing times; clock drift may make the given times decrease."""
    latest = start
    return [(latest := max(latest, until), part) for until, part in chain]


def _at(chain: Chain, moment: float) -> Part | None:
    index = bisect_right(chain, moment, key=lambda entry: entry[0])
    return chain[min(index, len(chain) - 1)][1]
