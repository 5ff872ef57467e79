"""The server-sent events of one answer, across the engines that produce it. Pure.

Only whole events are passed on and counted. When another engine restarts the stream, events that
the client already has are dropped, and the rest keeps the first stream's `created`.
"""

import re

END = b"\n\n"
DONE = b"data: [DONE]"
LAST_RESPONSE_EVENTS = (b"event: response.completed\n", b"event: response.failed\n", b"event: error\n")
"""Prefixes of the last event of a Responses API stream, which has no other end mark."""
CREATED = re.compile(rb'"created":\d+')
"""The field as vLLM writes it; within a string its quotes would be escaped."""


class EventStream:
    """Splits bytes into events; send to the client what `feed` returns."""

    def __init__(self) -> None:
        self.sent = 0
        """Number of events passed on. Comments (`: ping`) do not count."""
        self.done = False
        """Whether the end mark has been passed on."""
        self._partial = b""
        self._seen = 0
        self._created: bytes | None = None
        self._restarted = False

    def restart(self) -> None:
        """Expect the stream to start again with its first event."""
        self._partial = b""
        self._seen = 0
        self._restarted = True

    def feed(self, data: bytes) -> bytes:
        """Return the whole events that `data` completes and the client does not have yet."""
        *events, self._partial = (self._partial + data).split(END)
        return b"".join(self._new(event) for event in events)

    def _new(self, event: bytes) -> bytes:
        if event.startswith(b":"):
            return event + END
        self._seen += 1
        if self._seen <= self.sent:
            return b""
        self.sent += 1
        self.done = event == DONE or event.startswith(LAST_RESPONSE_EVENTS)
        return self._dated(event) + END

    def _dated(self, event: bytes) -> bytes:
        if self._created is None:
            found = CREATED.search(event)
            self._created = found and found[0]
        return CREATED.sub(self._created, event, count=1) if self._restarted and self._created else event
