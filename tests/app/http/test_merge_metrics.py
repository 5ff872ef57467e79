"""Many expositions become one that a scraper accepts."""

from collections import Counter as Counter_
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.http.merge_metrics import merge

TRICKY = [
    'quo"te',
    "back\\slash\\",
    "new\nline",
    "{}",
    "a} 1",
    "a b,c",
    "\N{SNOWMAN}\x85\u2028",
    ',role="x",',
    ",role=",
]
"""Label values that a parser of lines could take for something else."""


def exposition(value: float, kinds: Any = (Counter, Gauge, Histogram, Summary)) -> str:
    """Families of each kind, without labels and with tricky ones, some a process's own role."""
    registry = CollectorRegistry()
    for kind in kinds:
        for labels in ([], ["a"], ["a", "replica", "role", "role2"], ["role"]):
            name = f"{kind.__name__.lower()}{len(labels)}{'a' in labels}"
            metric = kind(name, 'With \\ and \n and {braces} "quotes".', labels, registry=registry)
            for text in TRICKY if labels else ():
                child = metric.labels(*[text] * len(labels))
                getattr(child, "observe" if hasattr(child, "observe") else "inc")(value)
            if not labels:
                getattr(metric, "observe" if hasattr(metric, "observe") else "inc")(value)
    return generate_latest(registry).decode()


Series = tuple[str, frozenset[tuple[str, str]]]


def series(text: str, **more: str) -> Counter_[tuple[Series, float]]:
    """Return all samples that prometheus_client reads in `text`, with `more` labels, without
    creation times.
    """
    return Counter_(
        ((sample.name, frozenset((sample.labels | more).items())), sample.value)
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
        for sample in family.samples
    )


@pytest.mark.parametrize("replica", TRICKY)
def test_samples_mean_what_they_meant(replica: str):
    """Each process is named by the router, not by itself."""
    sources = [
        ("prefill", "p1", exposition(1e-07)),
        ("decode", "d1", exposition(12345678901234567890.0)),
        ("decode", replica, exposition(float("inf"), [Histogram])),
    ]
    merged = merge(sources)
    assert series(merged) == sum((series(text, role=role, replica=one) for role, one, text in sources), Counter_())
    assert "_created" not in merged


def test_families_that_differ_in_type():
    """A family has one TYPE line, that of the first process, and then all samples as written."""
    sources = [
        ("prefill", "p1", "# HELP x A gauge.\n# TYPE x gauge\nx 1e-07 1700000000000\n# HELP y \n# TYPE y gauge\ny 1\n"),
        ("decode", "d1", '# HELP x Else.\n# a comment\n# EOF\n# TYPE x histogram\nx_bucket{le="1"} 2\nx_count 2\n'),
    ]
    assert merge(sources).splitlines() == [
        "# HELP x A gauge.",
        "# TYPE x gauge",
        'x{role="prefill",replica="p1"} 1e-07 1700000000000',
        'x_bucket{role="decode",replica="d1",le="1"} 2',
        'x_count{role="decode",replica="d1"} 2',
        "# HELP y ",
        "# TYPE y gauge",
        'y{role="prefill",replica="p1"} 1',
    ]
