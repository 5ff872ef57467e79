"""Many expositions become one that a scraper accepts."""

from collections import Counter as Counter_

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.http.merge_metrics import merge


def exposition(requests: int, seconds: float) -> str:
    registry = CollectorRegistry()
    Counter("vllm:requests", "Requests.", ["model"], registry=registry).labels("m").inc(requests)
    Gauge("vllm:running", "Running.", registry=registry).set(requests)
    Histogram("vllm:latency_seconds", "Latency.", buckets=(1.0, 2.0), registry=registry).observe(seconds)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """Return values by (name, role, replica), without histogram buckets."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                found[sample.name, sample.labels["role"], sample.labels["replica"]] = sample.value
    return found


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


def expected(sources: list[tuple[str, str, str]]) -> Counter_[tuple[Series, float]]:
    return sum((series(text, role=role, replica=replica) for role, replica, text in sources), Counter_())


ODD = r"""# HELP odd With \\ and \n and {braces} "quotes".
# TYPE odd gauge
odd{a="x{y}z",b="say \"hi\"",c="back\\"} 1.0
odd{a="comma, and space",b="role=\"mine\"",c="}"} -2.5e-07
odd{a="",b="\n",c="# TYPE odd counter"} 4 1700000000000
odd{} 7
odd 8
odd	9
odd {a="spaced"} 10
# a comment

# TYPE bare counter
bare 1
# TYPE seconds histogram
seconds_bucket{le="1.0"} 1.0
seconds_bucket{le="+Inf"} 2.0
seconds_count 2.0
seconds_sum +Inf
# TYPE seconds_created gauge
seconds_created 1.7e9
stray_bucket{le="1.0"} 3
stray_created 4
# TYPE quantiles summary
quantiles{quantile="0.5"} 1
quantiles_count 1
quantiles_sum 1
# TYPE tardy histogram
# HELP tardy Said after its type.
tardy_bucket{le="+Inf"} 1
tardy_count 1
# TYPE empty gauge
"""


def test_odd_lines_mean_what_they_meant():
    """Label values have braces, quotes, spaces and escapes; samples have no labels, no type, or
    timestamps.
    """
    sources = [("prefill", "p1", ODD), ("decode", "d1", ODD), ("decode", "d2", exposition(1, 1.5))]
    merged = merge(sources)
    assert series(merged) == expected(sources)
    assert "_created" not in merged
    assert '# HELP odd With \\\\ and \\n and {braces} "quotes".\n' in merged
    tardy = [line for line in merged.splitlines() if "tardy" in line]
    assert [line.split("{")[0].split(" ")[0] for line in tardy] == ["#", "#", *["tardy_bucket", "tardy_count"] * 2]


def test_values_are_left_as_they_are():
    merged = merge([("r", "i", '# TYPE a gauge\na 12345678901234567890\na{b="c"} 1e-07 1700000000000\n')])
    assert merged == (
        "# TYPE a gauge\n"
        'a{role="r",replica="i"} 12345678901234567890\n'
        'a{role="r",replica="i",b="c"} 1e-07 1700000000000\n'
    )


@pytest.mark.parametrize("replica", ['quo"te', "back\\slash", "new\nline", "{}", "a b,c", "\N{SNOWMAN}\x85\u2028"])
def test_any_origin_is_escaped(replica: str):
    registry = CollectorRegistry()
    Gauge("plain", "Plain.", registry=registry).set(1)
    Gauge("labelled", "Labelled.", ["a"], registry=registry).labels(replica).set(2)
    sources = [("role", replica, generate_latest(registry).decode())]
    assert series(merge(sources)) == expected(sources)


def test_a_process_does_not_say_who_it_is():
    """Labels `role` and `replica` of a process are removed; similar names and values stay."""
    text = (
        '# TYPE a gauge\na{role="liar",b="c"} 1\na{b="c", replica = "x\\"}" ,role="y",} 2\na{role="x"} 3\n'
        'a{my_role="kept",replica2="kept"} 4\na{b="role=\\"x\\",replica"} 5\n'
    )
    sources = [("decode", "d1", text)]
    merged = merge(sources)
    assert series(merged) == expected(sources)
    assert merged.count('role="decode"') == 5


def test_families_that_differ_in_type():
    """A family has one TYPE line, that of the first process, and then all samples."""
    sources = [
        ("prefill", "p1", "# HELP x A gauge.\n# TYPE x gauge\nx 1\n# TYPE y gauge\ny 1\n"),
        ("decode", "d1", '# HELP x Else.\n# TYPE x histogram\nx_bucket{le="1"} 2\nx_count 2\nx_sum 2\n'),
        ("decode", "d2", "x 3\n"),
    ]
    merged = merge(sources)
    assert series(merged) == expected(sources)
    lines = merged.splitlines()
    assert lines[:2] == ["# HELP x A gauge.", "# TYPE x gauge"]
    assert [line.startswith("x") for line in lines[2:]] == [True] * 5 + [False] * 2
    assert sum(line.startswith("# TYPE x") for line in lines) == 1
