"""A stream of server-sent events as the client gets it, whichever engine it comes from. Pure.

Only whole events are passed on, and they are counted. When another engine begins the stream anew, the events
that the client has are left out, and the rest keeps the `created` of the first one.
"""

import re

END = b"\n\n"
DONE = b"data: [DONE]"
LAST_RESPONSE_EVENTS = (b"event: response.completed\n", b"event: response.failed\n", b"event: error\n")
"""How the last event of a stream of the Responses API begins: it has no other end mark."""
CREATED = re.compile(rb'"created":\d+')
"""As vLLM writes it; within a string the quotes would be escaped."""


class EventStream:
    """`feed` it bytes and send what it returns."""

    def __init__(self) -> None:
        self.sent = 0
        """Events that have been passed on; comments (`: ping`) do not count."""
        self.done = False
        """Whether the end mark has been passed on."""
        self._partial = b""
        self._seen = 0
        self._created: bytes | None = None
        self._restarted = False

    def restart(self) -> None:
        """What is fed from now on begins with the first event again."""
        self._partial = b""
        self._seen = 0
        self._restarted = True

    def feed(self, data: bytes) -> bytes:
        """The whole events that `data` completes and the client does not have."""
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
