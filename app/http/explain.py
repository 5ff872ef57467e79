"""What is told of one request: to the client that asks when its answer begins, and then to who watches the service.

`x-tandem-explain: 1` in; out come `x-tandem-decision`, what was decided and from which numbers, and `Server-Timing`,
where the time went: the W3C's header for this purpose, which browsers' developer tools draw and any client can split.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from actors.router.answer import Answer
from actors.router.client_request import ClientRequest
from actors.router.router import Router
from actors.telemetry.latency_breakdown import LatencyBreakdown
from actors.telemetry.recent_requests import MAX_ID_CHARACTERS, RequestRecord, now_unix
from app.http.traces import RequestTrace, Traces

EXPLAIN_HEADER = b"x-tandem-explain"
DECISION_HEADER = b"x-tandem-decision"
TIMING_HEADER = b"server-timing"

ACCOUNT_S = 0.5
"""How long the first bytes wait for prefill's word, for a client that wants to know where the time went. It is normally
there before them; on a busy machine it may come milliseconds later."""

RawHeaders = Iterable[tuple[bytes, bytes]]


def wants_explanation(headers: RawHeaders) -> bool:
    """Whether a request's headers ask for it; names come in lower case, as ASGI has them."""
    return any(name == EXPLAIN_HEADER and value.strip().lower() in {b"1", b"true"} for name, value in headers)


def server_timing(breakdown: LatencyBreakdown) -> tuple[bytes, bytes]:
    """The header with every part of the breakdown, and their sum, in milliseconds to the microsecond."""
    entries = [*breakdown.parts.items(), ("total", breakdown.total_s)]
    return TIMING_HEADER, ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in entries).encode()


@dataclass
class Observer:
    """Watches one request. `request` is the one to serve."""

    router: Router
    request: ClientRequest
    trace: RequestTrace | None
    kept: bool = False

    @classmethod
    @contextmanager
    def of(cls, router: Router, request: ClientRequest, traces: Traces | None) -> "Iterator[Observer]":
        """Watch while the context lasts; how it ends is how the request ended."""
        trace = traces.begin(request) if traces is not None else None
        error: BaseException | None = None
        try:
            yield cls(router, trace.request if trace is not None else request, trace)
        except BaseException as caught:
            error = caught
            raise
        finally:
            if trace is not None:
                trace.end(error)

    async def told(self, answer: Answer) -> RawHeaders:
        """The first bytes of the answer are there: what the client has asked to be told."""
        if answer.explanation is None or answer.start.status >= HTTPStatus.BAD_REQUEST:
            return ()
        await answer.account(ACCOUNT_S)
        return (DECISION_HEADER, answer.explanation.encode()), server_timing(answer.breakdown)

    def keep(self, answer: Answer, over: bool = False) -> None:
        """Keep the breakdown of an answer whose first bytes have been sent (the client does not wait for it): once,
        when all is known of it or the answer is `over`."""
        if self.kept or not (over or answer.accounted):
            return
        self.kept = True
        status = answer.start.status
        if status >= HTTPStatus.BAD_REQUEST:
            if self.trace is not None:
                self.trace.refused(status)
            return
        record = RequestRecord(
            request_id=self.request.request_id[:MAX_ID_CHARACTERS],
            began_at=now_unix(self.request.arrived_at),
            endpoint=self.request.endpoint,
            route=answer.route,
            reason=answer.local_reason,
            status=status,
            streams=answer.start.streams,
            pair=answer.pair,
            breakdown=answer.breakdown,
        )
        self.router.metrics.keep(answer.route, answer.breakdown)
        self.router.recent.add(record)
        if self.trace is not None:
            self.trace.answered(record)
