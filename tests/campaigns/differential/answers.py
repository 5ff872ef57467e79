"""Parse HTTP answers for comparison; one table lists the parts that cannot be equal.

A stream is joined, because its chunk boundaries depend on timing on either side. Its final chunks,
and the fields that all chunks repeat, are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RANDOM = re.compile(r"(?<![0-9a-f])([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,32})$")


def _kind_of_id(value: Any) -> Any:
    """`chatcmpl-tool-*` of `chatcmpl-tool-8f3a...`: the prefix of an id is part of the
    interface.
    """
    if isinstance(value, list):
        return [_kind_of_id(one) for one in value]
    return RANDOM.sub("*", value) if isinstance(value, str) else value


def _whether(value: Any) -> Any:
    if isinstance(value, list):
        return [_whether(one) for one in value]  # the distinct values of a stream's events
    return "null" if value is None else f"a {type(value).__name__}"


MUST_DIFFER: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "id": (_kind_of_id, "drawn by each server unless the client names it; its prefix is compared"),
    "item_id": (_kind_of_id, "as id"),
    "call_id": (_kind_of_id, "as id"),
    "created": (_whether, "the time of each server"),
    "created_at": (_whether, "as created"),
    "completed_at": (_whether, "as created"),
    "system_fingerprint": (_whether, "a digest of the engine's configuration; ours has a KV connector"),
    "kv_transfer_params": (lambda _: None, "how the two engines of a pair find each other: not for a client"),
    "signature": (_whether, "of a thought; drawn by each server"),
    "sequence_number": (lambda _: None, "counts the events of a stream, whose number depends on timing"),
    "root": (lambda _: None, "where each server has its checkpoint"),
}
"""Keys of an answer whose values cannot be equal: the comparison instead, and the reason."""


@dataclass(frozen=True)
class Reply:
    """A raw answer."""

    status: int
    content_type: str
    body: bytes

    @property
    def refuses_in_stream(self) -> bool:
        """A stream whose first event is an error: vLLM checks some parameters so late."""
        return self.content_type.startswith("text/event-stream") and self.body.startswith(b'data: {"error"')


@dataclass(frozen=True)
class Answer:
    """Content of an answer. `says` is a tree of lists and objects."""

    status: int
    content_type: str
    says: Any


def read(reply: Reply, exact_ids: bool = False) -> Answer:
    """Parse an answer.

    `exact_ids` if the client has named the request: both sides must use that name.
    """
    kind = reply.content_type.partition(";")[0].strip()
    if kind == "text/event-stream":
        says: Any = read_stream(reply.body)
    else:
        try:
            says = json.loads(reply.body)
        except ValueError:
            says = reply.body.decode(errors="replace")
    return Answer(reply.status, kind, says if exact_ids else comparable(says))


def comparable(tree: Any) -> Any:
    """Return `tree` with incomparable values replaced."""
    if isinstance(tree, list):
        return [comparable(one) for one in tree]
    if not isinstance(tree, dict):
        return tree
    return {key: _comparable(key, one) for key, one in tree.items()}


def _comparable(key: str, value: Any) -> Any:
    if key in MUST_DIFFER:
        return MUST_DIFFER[key][0](value)
    if key == "top_logprobs" and isinstance(value, list):
        return [_without_forbidden(comparable(one)) for one in value]
    if key == "arguments" and isinstance(value, str) and len(value) > len(APPENDED):
        return value.removesuffix(APPENDED)
    return comparable(value)


APPENDED = "{}"
"""Text that vLLM's parser appends to the arguments of a tool call if a length limit cuts off the
next call, and one event joins the end of these arguments with the end of the answer. Timing
decides.
"""

FORBIDDEN = -9999.0
"""vLLM's logprob of a token that the grammar or a bias forbids."""


def _without_forbidden(alternatives: Any) -> Any:
    """Replace forbidden tokens of a token's alternatives by a number that counts them.

    All of them are equally likely. `torch.topk` decides which of them are among the first k, and k
    is the largest number of logprobs that any request of the batch requests.
    """
    if isinstance(alternatives, dict) and "logprob" in alternatives:  # one entry of a chat's list
        return "forbidden" if alternatives["logprob"] == FORBIDDEN else alternatives
    if isinstance(alternatives, dict):
        allowed = {token: logprob for token, logprob in alternatives.items() if logprob != FORBIDDEN}
        return allowed | {"forbidden": len(alternatives) - len(allowed)}
    return alternatives


def read_stream(body: bytes) -> dict[str, Any]:
    """Parse OpenAI's chunks with an end mark, or named events of the Responses or Messages API."""
    frames = [frame for frame in body.decode().split("\n\n") if frame and not frame.startswith(":")]
    if frames and frames[0].startswith("event:"):
        return _read_events(frames)
    return _read_chunks(frames)


def events_of(reply: Reply) -> list[Any]:
    """Return the events of a stream of OpenAI's chunks one by one, with incomparable values
    replaced, and the end mark; the text of any other answer.
    """
    frames = [frame for frame in reply.body.decode().split("\n\n") if frame and not frame.startswith(":")]
    try:
        return [frame if frame == DONE else comparable(json.loads(frame.removeprefix("data: "))) for frame in frames]
    except ValueError:
        return frames


def joined(events: Sequence[Any]) -> Any:
    """Return the joined content of consecutive events."""
    total: dict[str, Any] = {"choices": {}}
    for event in events:
        if not isinstance(event, dict):
            return list(events)  # the end mark is an event of its own
        total |= {key: value for key, value in event.items() if key != "choices"}
        for choice in event.get("choices", ()):
            _add(total["choices"].setdefault(choice["index"], {}), choice)
    return total


DONE = "data: [DONE]"


def _read_chunks(frames: list[str]) -> dict[str, Any]:
    ended = bool(frames) and frames[-1] == DONE
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[: len(frames) - ended]]
    total: dict[str, Any] = {"ended": ended, "choices": {}, "usage": None}
    repeated: dict[str, list[Any]] = {}
    for chunk in chunks:
        if "error" in chunk:
            total["error"] = chunk["error"]
            continue
        for choice in chunk.get("choices", ()):
            _add(total["choices"].setdefault(str(choice["index"]), {}), choice)
        if chunk.get("usage"):
            total["usage"] = chunk["usage"]  # the value grows; the last one is complete
        for key, value in chunk.items():
            if key not in ("choices", "usage"):
                values = repeated.setdefault(key, [])
                if value not in values:
                    values.append(value)
    said = [chunk for chunk in chunks if "error" not in chunk]
    total["repeated"] = repeated
    total["usage_in_first"] = bool(said) and bool(said[0].get("usage"))
    total["last"] = _last_chunks(said)
    return total


def _last_chunks(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chunks that end a choice or the stream, in order of choices, without text in
    the same chunks.
    """
    ends = []
    for chunk in chunks:
        choices = chunk.get("choices", [])
        if choices and all(choice.get("finish_reason") is None for choice in choices):
            continue
        bare = [
            {"index": one["index"], "finish_reason": one["finish_reason"], "fields": sorted(one)} for one in choices
        ]
        # A growing usage is compared where it is complete.
        usage = {key: chunk[key] for key in ("usage",) if key in chunk and not choices}
        ends.append({"choices": bare, "fields": sorted(chunk), **usage})
    return sorted(ends, key=lambda end: [one["index"] for one in end["choices"]] or [1 << 30])


SAID_ONCE = frozenset({"finish_reason", "id", "role", "type", "stop_reason"})
"""Text in a stream's chunks that is not a part of a longer one."""


def _add(total: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if value is None:
            total.setdefault(name, None)
        elif isinstance(value, dict):
            if not isinstance(total.get(name), dict):
                total[name] = {}
            _add(total[name], value)
        elif name == "tool_calls":
            if not isinstance(total.get(name), dict):
                total[name] = {}
            for call in value:
                _add(total[name].setdefault(str(call["index"]), {}), call)
        elif isinstance(value, str | list) and name not in SAID_ONCE and total.get(name) is not None:
            total[name] = total[name] + value
        else:
            total[name] = value


DELTA_FIELDS = ("delta", "logprobs")


def _same_block(last: dict[str, Any], event: dict[str, Any]) -> bool:
    """Return whether both events are a piece of one content block of Anthropic's Messages API."""
    return event.get("type") == last.get("type") == "content_block_delta" and (
        event["index"],
        event["delta"]["type"],
    ) == (last["index"], last["delta"]["type"])


def _read_events(frames: list[str]) -> dict[str, Any]:
    """Return the events in order, with neighbouring deltas of one item joined."""
    events: list[dict[str, Any]] = []
    for frame in frames:
        name, _, data = frame.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event.get('type')}" or "error" in event, frame
        last = events[-1] if events else {}
        if event.get("type", "").endswith(".delta") and last.get("type") == event["type"]:
            for key in DELTA_FIELDS:
                if event.get(key) is not None:
                    last[key] = last[key] + event[key] if last.get(key) is not None else event[key]
        elif _same_block(last, event):
            for key, value in event["delta"].items():
                last["delta"][key] = value if key == "type" else last["delta"].get(key, "") + value
        else:
            events.append(event)
    return {"events": _without_textless_ends(events)}


def _without_textless_ends(value: Any) -> Any:
    """Return events without the logprobs of last tokens that have no text, such as EOS.

    In streams of /v1/responses, vLLM omits them if the token comes in an output of its own, and
    sends them if the frontend has joined it with the token before (`resolve_target_state` in
    vllm/entrypoints/openai/responses/streaming_events.py). Timing decides.
    """
    if isinstance(value, list):
        return [_without_textless_ends(one) for one in value]
    if not isinstance(value, dict):
        return value
    value = {key: _without_textless_ends(one) for key, one in value.items()}
    text = value.get("text", value.get("delta"))
    if isinstance(text, str):
        logprobs = value.get("logprobs")
        while logprobs and _has_no_text(logprobs[-1], text):
            logprobs.pop()
    return value


def _has_no_text(logprob: Any, text: str) -> bool:
    token = logprob.get("token") if isinstance(logprob, dict) else None
    return token is not None and not (token and text.endswith(token))
