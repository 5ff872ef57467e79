"""Where the time to a request's first token went. Pure: timestamps in, a partition of the interval out.

The interval goes from a request's arrival in the router to the first byte of its answer, on the router's clock. What an
engine has measured comes as durations since the call reached it, on the clock of its own host, and is never compared
with another host's clock. It is laid into the time between the router's sending of the call and the answer's
arrival: what the engine did not account for is the way there and back, half of it each. So a boundary between two parts
is off by at most half of the time on the way, and the sum of the parts is the total, whatever the clocks say.

Both legs run at once, so each moment is given to the one that the first token waits for:

    before prefill has computed the prompt      what prefill is doing (unless decode has all KV already)
    after that, and while decode waits for KV   `transfer`: the part of the transfer that prefill did not hide
    otherwise                                   what decode is doing
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

body            the client's sending of the request's body
router          reading the request, deciding, shaping the legs
retries         legs that broke, before those that answered were begun
slot_wait       a free slot on a replica of each role
hops            between router and engines, both ways
frontend        vLLM's serving layer: template and tokenizer before, detokenizer and response after
prefill_queue   prefill's scheduler
prefill         computing the prompt (of a local request: on decode, with the first token)
transfer        KV that was still to come when the prompt was computed
decode_queue    decode's scheduler: until there are blocks for the KV, and from its arrival to the next step
first_step      decode's first step
recompute       decode's first step where it had to compute the prompt, because the KV did not come
generation      the rest of an answer that is not streamed
unexplained     an engine said nothing of its time, or not in time
"""

PARTS: tuple[Part, ...] = get_args(Part)
"""In the order in which a request meets them."""


@dataclass(frozen=True)
class LegTimestamps:
    """One leg on the router's clock, in seconds, and what its engine says of it; None where it said nothing."""

    sent_at: float
    answered_at: float
    timings: EngineTimings | None


@dataclass(frozen=True)
class RequestTimestamps:
    """A request on the router's clock, in seconds. `decode.answered_at` is the first byte of the answer."""

    arrived_at: float
    read_at: float
    """The body is there."""
    tried_at: float
    """The first try begins."""
    retried_at: float
    """The try that answered begins; the same as `tried_at` when it was the first."""
    slots_at: float
    """There are places for its legs."""
    decode: LegTimestamps
    prefill: LegTimestamps | None
    """None for a local request; without timings where its answer had not come by then."""
    streams: bool


@dataclass(frozen=True)
class Span:
    """What the first token waited for from `begin_s` to `end_s`, counted from the request's arrival."""

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
"""What goes on until each time, in order; None stands for decode's wait for KV."""


def keep(timestamps: RequestTimestamps) -> LatencyBreakdown:
    """The breakdown of a request whose answer has begun."""
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
    """Until the prompt is computed."""
    reached_at = _reached_at(leg, timings)
    return [
        (reached_at, "hops"),
        (reached_at + timings.queued_s, "frontend"),
        (reached_at + timings.scheduled_s, "prefill_queue"),
        (reached_at + timings.first_token_s, "prefill"),
    ]


def _reached_at(leg: LegTimestamps, timings: EngineTimings) -> float:
    """When the call reached its engine: half of the time on the way is the way there."""
    on_the_way_s = max(leg.answered_at - leg.sent_at - timings.answered_s, 0.0)
    return leg.sent_at + on_the_way_s / 2


def _partition(
    start: float, end: float, before: Chain, prefill: Chain, decode: Chain, waited_for: Part
) -> tuple[Span, ...]:
    sent_at = before[-1][0]
    waits = [until for until, part in decode if part is None]
    # Once all KV is there, prefill is no longer waited for: the token that it draws is nobody's.
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
    """The same with times that do not go back, as they might where a clock drifts."""
    latest = start
    return [(latest := max(latest, until), part) for until, part in chain]


def _at(chain: Chain, moment: float) -> Part | None:
    """What goes on at `moment`; the last thing where it is later than all."""
    place = bisect_right(chain, moment, key=lambda entry: entry[0])
    return chain[min(place, len(chain) - 1)][1]
