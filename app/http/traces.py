"""OpenTelemetry spans: one per request and one per part of its latency breakdown.

The spans join the client's trace if the request has one. The router forwards the request's span to
the engines as parent, so vLLM's spans are in the same trace. The router adds the spans of the parts
after the answer has started, so that they do not delay it. `Traces` imports SDK and exporter, so
that a router without tracing needs neither.
"""

from http import HTTPStatus
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.request import Headers
from actors.router.client_request import ClientRequest
from actors.router.prompt_lists import AnyAnswer
from actors.telemetry.router_metrics import now_unix

PROPAGATED = ("traceparent", "tracestate")


class RequestTrace:
    """Span of one request; always call `end`."""

    def __init__(self, tracer: Tracer, request: ClientRequest) -> None:
        self._tracer = tracer
        self._began_ns = int(now_unix(request.arrived_at) * 1e9)
        given = {name.decode(): value.decode("latin-1") for name, value in request.headers}
        self._span: Span = tracer.start_span(
            f"POST {request.endpoint}",
            context=_PROPAGATOR.extract(given),
            kind=SpanKind.SERVER,
            start_time=self._began_ns,
            attributes={"url.path": request.endpoint, "tandem.request_id": request.request_id},
        )
        self._context = set_span_in_context(self._span)
        self.request = request.with_headers(self._forwarded(request.headers))
        """The request for the engines; its trace headers name this span as parent."""

    def answered(self, answer: AnyAnswer) -> None:
        """Record status, route, its reason and replicas; add a span per part of the breakdown.

        Call this after the answer has started. An answer with an error status has only a status.
        """
        self._span.set_attribute("http.response.status_code", answer.start.status)
        if answer.start.status >= HTTPStatus.BAD_REQUEST:
            return
        found = {"route": answer.route, "decode": answer.pair.decode, "prefill": answer.pair.prefill}
        for name, value in {**found, "local_reason": answer.local_reason}.items():
            if value is not None:
                self._span.set_attribute(f"tandem.{name}", value)
        for part in answer.breakdown.spans:
            span = self._tracer.start_span(part.part, self._context, start_time=self._at_ns(part.begin_s))
            span.end(self._at_ns(part.end_s))

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self._span.end()

    def _at_ns(self, seconds: float) -> int:
        return self._began_ns + int(seconds * 1e9)

    def _forwarded(self, headers: Headers) -> Headers:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        kept = [(name, value) for name, value in headers if name.decode() not in PROPAGATED]
        return (*kept, *((name.encode(), value.encode()) for name, value in carrier.items()))


class Traces:
    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The SDK's environment variables, for example OTEL_TRACES_SAMPLER, configure sampling.
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "tandem-router"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer: Any = self._provider.get_tracer("tandem")

    def begin(self, request: ClientRequest) -> RequestTrace:
        return RequestTrace(self._tracer, request)

    def flush(self) -> None:
        self._provider.force_flush()


_PROPAGATOR = TraceContextTextMapPropagator()
