"""Report one request in response headers, metrics, status page, access log and traces.

A client that sends `x-tandem-explain: 1`, with an operator's key if there are keys, receives two
headers, unless the answer is an error:
`x-tandem-decision`, the routing decision and its inputs, and `Server-Timing`, the latency breakdown
in the W3C format that browsers' developer tools display. If a stream has begun with keep-alive
comments, the router sends the two headers as SSE comments.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus

from starlette.types import Scope

from actors.router.client_request import ClientRequest
from actors.router.models.model_router import AnyAnswer, ModelRouter
from actors.telemetry.access_log import AccessEntry
from actors.telemetry.latency_breakdown import LatencyBreakdown
from actors.telemetry.recent_requests import MAX_ID_CHARACTERS, RequestRecord, now_unix
from app.http.auth import OPERATOR
from app.http.traces import RequestTrace, Traces

EXPLAIN_HEADER = b"x-tandem-explain"
DECISION_HEADER = b"x-tandem-decision"
TIMING_HEADER = b"server-timing"

ACCOUNT_S = 0.5
"""Maximum wait in seconds for the prefill engine's timings before an explained answer is sent.

The timings normally arrive before decode's first token, on a busy machine milliseconds after it.
"""

RawHeaders = Iterable[tuple[bytes, bytes]]


def wants_explanation(scope: Scope) -> bool:
    """Return whether the client asks for an explanation and may have one.

    The decision tells which prefixes of other clients are cached. The header of a key that is not
    an operator's is ignored: diagnostics must not fail a request. ASGI header names are lower case.
    """
    asks = any(name == EXPLAIN_HEADER and value.strip().lower() in {b"1", b"true"} for name, value in scope["headers"])
    return asks and scope.get(OPERATOR, True)


def server_timing(breakdown: LatencyBreakdown) -> tuple[bytes, bytes]:
    """Return the Server-Timing header: the parts of the breakdown and their sum, in ms."""
    entries = [*breakdown.parts.items(), ("total", breakdown.total_s)]
    return TIMING_HEADER, ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in entries).encode()


@dataclass
class Observer:
    """Observer that reports one request in its response headers, metrics, recent requests, access
    log and trace.

    The router must answer `request`, not the original one: if the request is traced, the headers of
    `request` name the trace's span as parent.
    """

    model: ModelRouter
    request: ClientRequest
    trace: RequestTrace | None
    entry: AccessEntry | None = None
    """Entry of the request in the access log; None without an access log."""
    kept: bool = False
    """True once `keep` has recorded the breakdown, or the status of an error."""

    @classmethod
    @contextmanager
    def of(
        cls, model: ModelRouter, request: ClientRequest, traces: Traces | None, entry: AccessEntry | None = None
    ) -> "Iterator[Observer]":
        """Set the request id of `entry`; yield an observer of `request`. Leaving ends the trace."""
        if entry is not None:
            entry.request_id = request.request_id
        trace = traces.begin(request) if traces is not None else None
        error: BaseException | None = None
        try:
            yield cls(model, trace.request if trace is not None else request, trace, entry)
        except BaseException as caught:
            error = caught
            raise
        finally:
            if trace is not None:
                trace.end(error)

    async def response_headers(self, answer: AnyAnswer) -> RawHeaders:
        """Return the explanation headers if the client asked for them and the answer is no error.

        Call this after the first bytes of the answer have arrived. Waits at most ACCOUNT_S for the
        prefill engine's timings.
        """
        if answer.explanation is None or answer.start.status >= HTTPStatus.BAD_REQUEST:
            return ()
        await answer.account(ACCOUNT_S)
        return (DECISION_HEADER, answer.explanation.encode()), server_timing(answer.breakdown)

    def keep(self, answer: AnyAnswer, over: bool = False) -> None:
        """Record the breakdown of an answer once: when all timings are known, or with `over`.

        Call this after sending the first bytes, so that it does not delay them, and with `over`
        when the answer has ended. `over` also adds the answer to the entry of the access log. An
        answer with an error status has no breakdown; only the trace receives its status.
        """
        if over and self.entry is not None and answer.start.status < HTTPStatus.BAD_REQUEST:
            self.entry.answered(
                **({"model": self.model.names[0]} if self.model.names else {}),
                route=answer.route,
                reason=answer.local_reason,
                **asdict(answer.pair),
                stream=answer.start.streams,
                parts_ms={part: round(seconds * 1e3, 3) for part, seconds in answer.breakdown.parts.items()},
                prompt_tokens=answer.prompt_tokens,
                completion_tokens=answer.completion_tokens,
            )
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
        self.model.metrics.observe_breakdown(answer.route, answer.breakdown)
        self.model.recent.add(record)
        if self.trace is not None:
            self.trace.answered(record)
