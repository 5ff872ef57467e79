"""Every query of the alerts and the dashboard uses existing names, labels and values of
/metrics.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import promql_parser
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from actors.engine.split_call import BROKEN
from actors.policy.choice import NO_PREFILL, PREFILL_FAILED
from actors.router.attempt import COUNTED_AS
from actors.telemetry.latency_breakdown import LatencyBreakdown, Span
from actors.telemetry.router_metrics import RouterMetrics
from app.http.generate import REFUSED
from app.http.merge_metrics import merge
from tests.k8s.check import ROOT, only
from tests.k8s.kustomize import render

DASHBOARD = json.loads((ROOT / "dashboards" / "tandem.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
KV_ENDS = ("sent", "received", "recomputed")
OUTCOMES = sorted({COUNTED_AS.get(outcome, outcome) for outcome in BROKEN} | {"done", "cancelled"})

Labels = dict[str, set[str]]


@cache
def rules() -> tuple[dict[str, Any], ...]:
    (manifest,) = only(render(ROOT / "overlays" / "gpu"), "PrometheusRule")
    return tuple(rule for group in manifest["spec"]["groups"] for rule in group["rules"])


@cache
def emitted() -> dict[str, Labels]:
    """Return labels and their values by sample name: the router's metrics of one of several
    models, used once in every way, and vLLM's logger.
    """
    router = RouterMetrics("llama")
    for route, reason in (("remote", ""), ("local", NO_PREFILL), ("local", PREFILL_FAILED), (REFUSED, "")):
        for status in (200, 429, 503):
            router.requests.labels(route, reason, status).inc()
        router.first_byte.labels(route).observe(1)
    for route in ("remote", "local"):
        router.observe_breakdown(route, LatencyBreakdown((Span("prefill", 0.0, 1.0),)))
    for outcome in OUTCOMES:
        router.prefill_legs.labels(outcome).inc()
    engine = vllm_exposition()
    text = merge([("router", "r", router.exposition()), ("prefill", "p", engine), ("decode", "d", engine)])
    found: dict[str, Labels] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def vllm_exposition() -> str:
    """Return an engine process's metrics without an engine: vLLM's own and the connector's."""
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from connectors.vllm_hma.connector import TandemConnector
    from tests.vllm_contract.caches import vllm_config

    PrometheusStatLogger(vllm_config())
    transfer = KVTransferConfig(
        kv_connector="TandemConnector", kv_connector_module_path="connectors.vllm_hma.connector", kv_role="kv_both"
    )
    types: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    connector = TandemConnector.build_prom_metrics(
        VllmConfig(kv_transfer_config=transfer), types, ["model_name", "engine"], {0: ["m", "0"]}
    )
    counts = {"requests": dict.fromkeys(KV_ENDS, 1), "bytes": {"0": 1}, "writes": {"done": 1, "failed": 1}}
    counts |= {"pair_bytes": {"e": 1}, "pair_seconds": {"e": 1}}
    connector.observe({"counts": counts, "ranks": {"0": {"held": 1}}})
    text = generate_latest(REGISTRY).decode()
    unregister_vllm_metrics()
    return text


def recorded() -> dict[str, Labels]:
    """Return the labels of recording rules: those that their outermost sum keeps."""
    made = {}
    for rule in rules():
        if "record" in rule:
            expression = promql_parser.parse(rule["expr"])
            assert isinstance(expression, promql_parser.AggregateExpr)
            assert expression.modifier is not None
            source = next(_selectors(expression)).name
            made[rule["record"]] = {name: emitted()[source].get(name, set()) for name in expression.modifier.labels}
    return made


def queries() -> list[Any]:
    rows = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    rows += [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
    return [pytest.param(expression, id=name) for name, expression in rows]


def _children(node: Any) -> Iterator[Any]:
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield child
    yield from getattr(node, "args", None) or ()


def _selectors(node: Any) -> Iterator[Any]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    else:
        for child in _children(node):
            yield from _selectors(child)


def _names(expression: str) -> set[str]:
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    return {str(selector.name) for selector in _selectors(parsed)}


def _groupings(node: Any) -> Iterator[Any]:
    if isinstance(node, promql_parser.AggregateExpr):
        yield node
    for child in _children(node):
        yield from _groupings(child)


@pytest.mark.parametrize("expression", queries())
def test_a_query_finds_its_series(expression: str) -> None:
    """Each query is valid PromQL, and its metrics, matchers and grouping labels exist."""
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    known = emitted() | recorded()
    selectors = list(_selectors(parsed))
    assert selectors
    for selector in selectors:
        assert selector.name in known, f"/metrics has no {selector.name}"
        labels = known[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
            if matcher.op == promql_parser.MatchOp.Equal and matcher.name != "status":
                assert matcher.value in labels[matcher.name], (
                    f"{matcher.name} of {selector.name} is never {matcher.value}"
                )
    for grouping in _groupings(parsed):
        for selector in _selectors(grouping):
            lost = set(grouping.modifier.labels if grouping.modifier else ()) - set(known[selector.name])
            assert not lost, f"{selector.name} has no label {lost}"


@pytest.mark.parametrize("expression", queries())
def test_a_series_that_two_routers_report_counts_once(expression: str) -> None:
    """Engines' series are scraped through each router: a sum must be over the maximum by
    replica.
    """
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    for grouping in _groupings(parsed):
        names = {selector.name for selector in _selectors(grouping)}
        if str(grouping.op) == "sum" and not names & set(recorded()):
            inner = grouping.expr
            assert isinstance(inner, promql_parser.AggregateExpr), f"{grouping}: sums scrapes, not replicas"
            assert str(inner.op) == "max"
            assert inner.modifier is not None
            kept = set(inner.modifier.labels)
            assert "replica" in kept
            # Without some labels it would be a maximum over different series.
            for selector in _selectors(inner):
                fixed = {one.name for one in selector.matchers.matchers if one.op == promql_parser.MatchOp.Equal}
                same = {"role"} if selector.name.startswith("tandem_") else {"role", "model_name"}
                lost = set(emitted()[selector.name]) - kept - fixed - same
                assert not lost, f"{grouping}: {selector.name} differs by {lost}"


def test_every_alert_says_how_bad_it_is_and_is_explained() -> None:
    """docs/troubleshooting.md has a line for each alert."""
    guide = (ROOT.parent / "docs" / "troubleshooting.md").read_text()
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            assert f"| `{rule['alert']}` |" in guide


def test_the_dashboard_shows_whatever_the_connector_reports() -> None:
    """The dashboard has every metric, and alerts cover blocks that only an engine's end frees."""
    reported = {name for name in emitted() if name.startswith("vllm:tandem_kv_") and not name.endswith("_created")}
    shown = {name for panel in PANELS for target in panel["targets"] for name in _names(target["expr"])}
    assert reported <= shown
    alerted = {name for rule in rules() if "alert" in rule for name in _names(rule["expr"])}
    assert {"vllm:tandem_kv_quarantined", "vllm:tandem_kv_hanging"} <= alerted & reported


def test_the_dashboard_is_well_formed() -> None:
    """Ids are unique, and the reader chooses the data source."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    for panel in PANELS:
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(one == {"type": "prometheus", "uid": f"${{{variable['name']}}}"} for one in sources)
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
