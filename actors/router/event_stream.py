"""Split an answer into server-sent events and remove duplicates of a resumed stream.

When another engine restarts the stream, `EventStream` drops the events already sent and sets
`created` of later events to its value in the first stream. It never drops the first error, which
ends the stream. Does no I/O.
"""

import re

DATA = b"data: "
END = b"\n\n"
DONE = DATA + b"[DONE]"
LAST_EVENTS = (
    b"event: response.completed\n",
    b"event: response.failed\n",
    b"event: message_stop\n",
)
"""Prefixes of the last event of a Responses or Messages API stream, which has no `[DONE]`."""
ERRORS = (b'data: {"error"', b"event: error\n")
"""Prefixes of the event with which an engine ends a stream that it cannot complete."""
CREATED = re.compile(rb'"created":\d+')
"""The `created` field in vLLM's encoding. Cannot match in a string, where quotes are escaped."""


class EventStream:
    """Parser of the bytes of engines into events; `feed` returns the bytes for the client."""

    def __init__(self) -> None:
        self.sent = 0
        """Number of events returned, without comments (`: ping`)."""
        self.done = False
        """True once `feed` has returned the last event; it returns no event after that."""
        self._partial = b""
        self._seen = 0
        self._created: bytes | None = None
        self._restarted = False

    def restart(self) -> None:
        """Prepare for the stream of another engine, which repeats the first events."""
        self._partial = b""
        self._seen = 0
        self._restarted = True

    def feed(self, data: bytes) -> bytes:
        """Return the events and comments that `data` completes, without events already sent."""
        *events, self._partial = (self._partial + data).split(END)
        return b"".join(self._new(event) for event in events)

    def _new(self, event: bytes) -> bytes:
        if event.startswith(b":"):
            return event + END
        if self.done:
            return b""
        if event.startswith(ERRORS):
            # The engine repeats no further event, and may die before its `[DONE]`.
            self.sent += 1
            self.done = True
            return event + END + (DONE + END if event.startswith(DATA) else b"")
        self._seen += 1
        if self._seen <= self.sent:
            return b""
        self.sent += 1
        self.done = event == DONE or event.startswith(LAST_EVENTS)
        return self._dated(event) + END

    def _dated(self, event: bytes) -> bytes:
        if self._created is None:
            found = CREATED.search(event)
            self._created = found and found[0]
        return CREATED.sub(self._created, event, count=1) if self._restarted and self._created else event
