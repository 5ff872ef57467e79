"""Many expositions become one that a scraper accepts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import merge


def exposition(requests: int, seconds: float) -> str:
    """What one process with three kinds of metrics exposes."""
    registry = CollectorRegistry()
    Counter("vllm:requests", "Requests.", ["model"], registry=registry).labels("m").inc(requests)
    Gauge("vllm:running", "Running.", registry=registry).set(requests)
    Histogram("vllm:latency_seconds", "Latency.", buckets=(1.0, 2.0), registry=registry).observe(seconds)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """(name, role, replica) to value, histogram buckets left out."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                found[sample.name, sample.labels["role"], sample.labels["replica"]] = sample.value
    return found


def test_every_sample_keeps_its_value_and_gains_its_origin():
    """Equal series of two processes stay apart by role and replica."""
    merged = merge([("prefill", "p1", exposition(3, 0.5)), ("decode", "d1", exposition(5, 1.5))])
    assert samples(merged) == {
        ("vllm:requests_total", "prefill", "p1"): 3,
        ("vllm:requests_total", "decode", "d1"): 5,
        ("vllm:running", "prefill", "p1"): 3,
        ("vllm:running", "decode", "d1"): 5,
        ("vllm:latency_seconds_count", "prefill", "p1"): 1,
        ("vllm:latency_seconds_count", "decode", "d1"): 1,
        ("vllm:latency_seconds_sum", "prefill", "p1"): 0.5,
        ("vllm:latency_seconds_sum", "decode", "d1"): 1.5,
    }
    assert 'model="m"' in merged


def test_a_family_is_declared_once():
    """Prometheus refuses a second TYPE line of one name."""
    merged = merge([("decode", f"d{index}", exposition(1, 1.0)) for index in range(4)])
    types = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert sorted(types) == [
        "# TYPE vllm:latency_seconds histogram",
        "# TYPE vllm:requests_total counter",
        "# TYPE vllm:running gauge",
    ]


def test_nothing_to_merge():
    """A service without engines still answers."""
    assert merge([]) == ""
