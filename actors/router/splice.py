"""The client's stream, from one engine or from several; a later one first repeats what was sent.

A stream continues on another engine after a failure, and on decode after prefill's first token.
`Splice` records the tokens, checks that the next engine continues them, and drops the events that
the client has. Does no I/O.
"""

import re
from array import array
from collections.abc import Sequence
from http import HTTPStatus
from itertools import islice

from actors.errors import CannotResumeError, HandoverError, MovedError
from actors.request import (
    FirstTokenChunk,
    Moved,
    ReplayLog,
    ResponseStart,
    StreamChunk,
    TokenChunk,
    TokenGroup,
    TokenSource,
)
from actors.telemetry.router_metrics import RouterMetrics

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


Streamed = StreamChunk | ResponseStart | Moved | bytes
"""Item of a call after the start of its answer."""


class Splice:
    """Items of engines in, bytes for the client out.

    ``records``  whether another engine may continue the stream, so that its tokens are recorded
    """

    def __init__(self, records: bool, metrics: RouterMetrics) -> None:
        self.sent = 0
        """Number of events returned, without comments (`: ping`)."""
        self.done = False
        """True once `feed` has returned the last event; it returns no event after that."""
        self.source: TokenSource | None = None
        """Identity of what computed the recorded tokens; None if unknown."""
        self.handed_over: TokenGroup | None = None
        """Prefill's first token, until decode has repeated it."""
        self.awaits_decode = False
        """Whether prefill has sampled the first token, and decode's stream has not started."""
        self.from_decode = False
        """Whether decode's stream has replaced prefill's, of which nothing was sent."""
        self._records = records
        self._metrics = metrics
        self._tokens = array("I")
        self._sizes = array("I")
        """Recorded tokens, and the size of each group: 4 bytes per token and 4 per group."""
        self._repeats = 0
        """Number of recorded groups that the current engine has not repeated yet."""
        self._prompt_digest: bytes | None = None
        self._verified = False
        """Whether prompt and source of the current engine's tokens are checked."""
        self._muted = False
        """True if decode could not verify prefill's first token: the client receives decode's."""
        self._partial = b""
        self._comments = b""
        """Comments before the first event: they must not start a response."""
        self._seen = 0
        self._created: bytes | None = None
        self._restarted = False

    @property
    def tokens(self) -> int:
        """Number of recorded tokens."""
        return len(self._tokens)

    def replay_log(self) -> ReplayLog:
        """Return the recorded token groups, which another engine must repeat."""
        tokens = iter(self._tokens)
        return tuple(tuple(islice(tokens, size)) for size in self._sizes)

    def restart(self) -> None:
        """Prepare for another engine. It repeats the events that were sent, or may differ if the
        client has received none.
        """
        self.awaits_decode = self.from_decode = False
        if self.sent == 0:
            del self._tokens[:], self._sizes[:]
            self._prompt_digest = self.source = self.handed_over = None
        self._partial = b""
        self._seen = 0
        self._restarted = True
        self._repeats = len(self._sizes)
        self._verified = self._muted = False

    def feed(self, item: Streamed) -> bytes:
        """Return the events that `item` completes, without those already sent.

        A ResponseStart precedes the items of decode after those of prefill's first token. Raises
        CannotResumeError if an engine does not continue the recorded tokens, HandoverError if
        decode does not repeat prefill's first token, MovedError at the end of a stream that moves.
        """
        if isinstance(item, StreamChunk):
            if self._records and item.groups:
                self._record(item)
            data = item.body
        elif isinstance(item, ResponseStart):
            self._take_over(item)
            return b""
        elif isinstance(item, Moved):
            raise MovedError(item.transfer)
        else:
            data = item
        if self._muted:
            return b""
        *events, self._partial = (self._partial + data).split(END)
        passed = b"".join([self._new(event) for event in events])
        if self.sent == 0:
            self._comments += passed
            return b""
        if self._comments:
            passed, self._comments = self._comments + passed, b""
        if self.done and self.over:
            self._metrics.first_tokens.labels("ended").inc()
        return passed

    @property
    def over(self) -> bool:
        """True if prefill's first token completes the answer, so that decode sends nothing."""
        return self.done and self.awaits_decode

    def _take_over(self, start: ResponseStart) -> None:
        """Begin with decode's stream after prefill's first token, which decode repeats."""
        if not start.streams:
            answered = f"decode answered HTTP {start.status} after prefill's first token"
            if start.status == HTTPStatus.TOO_MANY_REQUESTS or start.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise HandoverError(answered)
            raise CannotResumeError(f"{answered}; send the request again")
        self.restart()
        self.from_decode = self.sent == 0

    def _record(self, item: StreamChunk) -> None:
        groups: Sequence[TokenGroup] = item.groups
        if not self._verified:
            assert isinstance(item, TokenChunk | FirstTokenChunk)
            self._verify(item)
        elif self.source is None and isinstance(item, TokenChunk | FirstTokenChunk):
            self.source = item.source
        if self._muted:
            return
        if self._repeats:
            repeated = min(self._repeats, len(groups))
            self._repeats -= repeated
            groups = groups[repeated:]
        for group in groups:
            self._tokens.extend(group)
            self._sizes.append(len(group))

    def _verify(self, item: TokenChunk | FirstTokenChunk) -> None:
        """Compare prompt, source and first token of an engine with those of the recorded tokens.

        The engines may have fetched different content from one image URL, a chat template may have
        inserted another date, or a host may have another adapter at the same path.
        """
        self._verified = True
        if not self._repeats:
            self._prompt_digest, self.source = item.prompt_digest, item.source
            if isinstance(item, FirstTokenChunk):
                self.awaits_decode = True
                self._muted = item.source is None
                self.handed_over = None if self._muted else item.groups[0]
            return
        expected, self.handed_over = self.handed_over, None
        if expected is not None and item.source is None:
            self._metrics.first_tokens.labels("replayed").inc()
            raise HandoverError("decode has not reported which adapter continues prefill's first token")
        if item.source is None or item.source != self.source:
            problem = "the next engine computes with another model or adapter, or cannot verify which"
        elif item.prompt_digest != self._prompt_digest:
            problem = (
                "the next engine built a different prompt from this request, for example because an image URL returned "
                "different content"
            )
        elif expected is None or item.groups[0] == expected:
            if expected is not None:
                self._metrics.first_tokens.labels("repeated").inc()
            elif isinstance(item, TokenChunk):
                way = "moved" if item.prefilled == self.tokens else "prefilled"
                self._metrics.resumed_tokens.labels(way).inc(item.prefilled)
                self._metrics.resumed_tokens.labels("replayed").inc(self.tokens - item.prefilled)
            return
        else:
            self._metrics.first_tokens.labels("replayed").inc()
            raise HandoverError(f"prefill sampled the first token {expected}, but decode sampled {item.groups[0]}")
        (self._metrics.resumed_streams if expected is None else self._metrics.first_tokens).labels("refused").inc()
        raise CannotResumeError(f"the stream cannot be continued: {problem}; send the request again")

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
        if self._created is None or self._restarted:
            event = self._dated(event)
        return event + END

    def _dated(self, event: bytes) -> bytes:
        """Give an event of a later engine the first engine's `created`."""
        if self._created is None:
            found = CREATED.search(event)
            self._created = found[0] if found else b""
        return CREATED.sub(self._created, event, count=1) if self._restarted and self._created else event
