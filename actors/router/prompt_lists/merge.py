"""Merge the answers to several prompts into vLLM's answer to a list of prompts. Does no I/O.

The format is that of `completion_stream_generator` and `request_output_to_completion_response` in
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/entrypoints/openai/completion/serving.py
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from actors.router.splice import DATA, DONE, END

COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
OF_ONE_PROMPT = "metrics"
"""Field that vLLM sets only in answers to one prompt."""


def merged_body(bodies: Sequence[bytes], answer_id: str) -> bytes:
    """Return one response body with the choices of all `bodies`."""
    parts = [json.loads(body) for body in bodies]
    choices = [choice for part in parts for choice in part["choices"]]
    for index, choice in enumerate(choices):
        choice["index"] = index
    merged = {**parts[0], "id": answer_id, "choices": choices}
    if OF_ONE_PROMPT in merged:
        merged[OF_ONE_PROMPT] = None
    # As in vLLM, the details are taken from the last prompt's usage.
    merged["usage"] = {**parts[-1]["usage"], **_total([part["usage"] for part in parts])}
    return _encode(merged)


def error_event(body: bytes) -> bytes:
    """Return an error response as the event of a stream. Raises ValueError for invalid JSON."""
    return DATA + _encode(json.loads(body)) + END


class MergedStream:
    """Stream merged from the events of several streams; `feed` returns the bytes for the client."""

    def __init__(self, streams: int, choices: int, answer_id: str) -> None:
        """Merge `streams` streams of `choices` choices each."""
        self.done = False
        """True once `feed` has returned the last event."""
        self._open = set(range(streams))
        self._choices = choices
        self._id = answer_id
        self._created: Any = None
        self._first: int | None = None
        """Stream that sent the first event; vLLM reports the usage details of its prompt."""
        self._usages: dict[int, dict[str, Any]] = {}
        """Usage event of each stream that has sent one."""

    def feed(self, stream: int, events: bytes) -> bytes:
        """Return the client's bytes for whole `events` of one stream."""
        return b"".join(self._event(stream, event) for event in events.split(END)[:-1])

    def _event(self, stream: int, event: bytes) -> bytes:
        if self.done:
            return b""
        if event == DONE:
            return self._ended(stream)
        if not event.startswith(DATA):
            return event + END  # a comment
        chunk = json.loads(event.removeprefix(DATA))
        if "error" in chunk:
            self.done = True
            return event + END + DONE + END
        self._first = stream if self._first is None else self._first
        self._created = chunk["created"] if self._created is None else self._created
        chunk |= {"id": self._id, "created": self._created}
        if not chunk["choices"]:
            self._usages[stream] = chunk
            return b""
        for choice in chunk["choices"]:
            choice["index"] += stream * self._choices
        return DATA + _encode(chunk) + END

    def _ended(self, stream: int) -> bytes:
        self._open.discard(stream)
        if self._open:
            return b""
        self.done = True
        usage = b""
        if self._usages:
            last = self._usages[self._first if self._first in self._usages else min(self._usages)]
            last.pop(OF_ONE_PROMPT, None)
            last["usage"] |= _total([one["usage"] for one in self._usages.values()])
            usage = DATA + _encode(last) + END
        return usage + DONE + END


def _total(usages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {name: sum(usage[name] for usage in usages) for name in COUNTS}


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
