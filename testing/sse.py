"""Read streams of server-sent events independently of their chunk boundaries."""

from __future__ import annotations

import json
from typing import Any

NOT_SAID_TWICE = ("id", "object", "created", "model")


def events(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a whole stream, which must end with `data: [DONE]`."""
    *frames, last, empty = stream.decode().split("\n\n")
    assert (last, empty) == ("data: [DONE]", ""), stream[-200:]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if not frame.startswith(":")]


def said(stream: bytes) -> dict[str, Any]:
    """Return the joined content of a stream of one choice, without the random ids of tool calls.

    The fields that every event repeats must be the same in all events.
    """
    total: dict[str, Any] = {}
    for event in events(stream):
        assert "error" not in event, event
        for name in NOT_SAID_TWICE:
            assert total.setdefault(name, event[name]) == event[name], f"{name} changed within a stream"
        for choice in event["choices"]:
            _add(total, choice)
        if event.get("usage"):
            total["usage"] = event["usage"]  # usage grows; its last value is complete
    total.pop("created")
    return total


def _add(total: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if value is None or (name == "id" and isinstance(total.get(name), str)):
            continue
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        elif name == "tool_calls":
            calls = total.setdefault(name, {})
            for call in value:
                _add(
                    calls.setdefault(call["index"], {}), {key: call[key] for key in call if key not in ("id", "index")}
                )
        elif isinstance(value, str | list) and name != "finish_reason":
            total[name] = total[name] + value if name in total else value
        else:
            total[name] = value
