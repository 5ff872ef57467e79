"""Spans at a collector: the real SDK and exporter, and OTLP's own messages over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from actors.request import ResponseStart
from actors.router.client_request import ClientRequest
from actors.telemetry.router_metrics import Pair
from app.http.traces import Traces
from tests.actors.telemetry.test_latency_breakdown import REMOTE, break_down

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENTS_SPAN = "00f067aa0ba902b7"
CLIENTS = b"00-%s-%s-01" % (TRACE_ID.encode(), CLIENTS_SPAN.encode())


class Collector:
    """Replacement of an OpenTelemetry collector; `spans` has the received spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                message = ExportTraceServiceRequest.FromString(body)
                for resource in message.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, daemon=True)
    thread.start()
    yield collector
    collector.server.shutdown()
    thread.join()
    collector.server.server_close()


def request(*headers: tuple[bytes, bytes]) -> ClientRequest:
    return ClientRequest("/v1/completions", ((b"x-request-id", b"r1"), *headers), b"{}", {})


def answer() -> Any:
    return SimpleNamespace(
        start=ResponseStart(200, ()),
        route="remote",
        local_reason=None,
        pair=Pair("p", "d"),
        breakdown=break_down(REMOTE),
    )


def test_a_requests_parts_join_the_clients_trace(collector: Collector) -> None:
    """The request is a child of the client's span; its parts are its children and fill its time.

    Both legs carry this span instead of the client's, and the client's other trace headers.
    """
    traces = Traces(collector.endpoint)
    wanted = request((b"traceparent", CLIENTS), (b"tracestate", b"a=b"))
    trace = traces.begin(wanted)
    trace.answered(answer())
    trace.end()
    traces.flush()
    (root,) = (span for span in collector.spans if span.name == "POST /v1/completions")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, CLIENTS_SPAN)
    parts = [span for span in collector.spans if span is not root]
    assert [span.name for span in parts] == [span.part for span in break_down(REMOTE).spans]
    assert {span.parent_span_id for span in parts} == {root.span_id}
    assert parts[0].start_time_unix_nano == root.start_time_unix_nano
    for before, after in pairwise(parts):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert parts[-1].end_time_unix_nano - root.start_time_unix_nano == 82 * 10**9
    attributes = {pair.key: pair.value.string_value for pair in root.attributes}
    assert attributes["tandem.route"] == "remote"
    assert (attributes["tandem.prefill"], attributes["tandem.decode"]) == ("p", "d")
    headers = dict(trace.request.headers)
    assert headers[b"traceparent"].decode() == f"00-{TRACE_ID}-{root.span_id.hex()}-01"
    assert (headers[b"tracestate"], headers[b"x-request-id"]) == (b"a=b", b"r1")


@pytest.mark.parametrize("given", [(), ((b"traceparent", b"nonsense"),)])
def test_a_client_without_a_trace_gets_one(collector: Collector, given: tuple[tuple[bytes, bytes], ...]) -> None:
    """An invalid trace context is ignored."""
    traces = Traces(collector.endpoint)
    trace = traces.begin(request(*given))
    trace.end(ConnectionError("gone"))
    traces.flush()
    (root,) = collector.spans
    assert root.parent_span_id == b""
    assert root.status.message == "ConnectionError"


def test_a_client_that_does_not_sample_is_heard(collector: Collector) -> None:
    """The client's flag reaches the engines, and no span is sent."""
    traces = Traces(collector.endpoint)
    wanted = request((b"traceparent", CLIENTS[:-1] + b"0"))
    trace = traces.begin(wanted)
    trace.answered(answer())
    trace.end()
    traces.flush()
    assert collector.spans == []
    assert dict(trace.request.headers)[b"traceparent"].endswith(b"-00")
