"""Count the bytes that a connector has moved, from its metrics or trace."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY


def nixl_bytes() -> float:
    """Return the number of bytes that NixlConnector's metrics report as moved."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:nixl_bytes_transferred_sum"
    )


def written_bytes(events: list[dict[str, Any]]) -> int:
    return sum(sum(event["bytes"].values()) for event in events if event["event"] == "write")
