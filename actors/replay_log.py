"""What a streamed answer consists of so far, so that another engine can go on with it.

The engine records the token ids of every step that it hands to vLLM's serving layer as one *group*; the groups
travel to the router with the bytes that the serving layer made of them. A call that carries such a replay_log makes
its engine emit exactly these groups again, and then go on. Pure but for the context variable and the timestamps.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field

from actors.errors import CannotResumeError
from actors.request import ReplayLog, StreamChunk, TokenGroup
from actors.telemetry.timestamps import CallTimestamps


@dataclass
class ServedCall:
    """One call while its engine serves it: what to emit again, and what is recorded for the router."""

    replay: ReplayLog = ()
    problem: CannotResumeError | None = None
    taken: Callable[[], None] = lambda: None
    """To be called when the serving layer has done with an output."""
    timestamps: CallTimestamps = field(default_factory=CallTimestamps)
    _new: deque[TokenGroup] = field(default_factory=deque)
    _began: bool = False

    def begin(self) -> bool:
        """Whether this is the call's first generation; only that one is recorded."""
        first, self._began = not self._began, True
        return first

    def record(self, tokens: Sequence[int]) -> None:
        """Note a group, before the serving layer sees it."""
        if tokens:
            self._new.append(tuple(tokens))

    def chunk(self, body: bytes) -> bytes | StreamChunk:
        """`body` with what has been recorded since the last chunk."""
        timings = self.timestamps.tell()
        if not self._new and timings is None:
            return body
        groups = tuple(self._new)
        self._new.clear()
        return StreamChunk(body, groups, timings)

    def fail(self, why: str) -> CannotResumeError:
        """Note, and return, why the call cannot go on as it should."""
        self.problem = CannotResumeError(why)
        return self.problem

    def check(self) -> None:
        """Raise what `fail` has noted: vLLM's serving layer would make an answer of it."""
        if self.problem is not None:
            raise self.problem

    def context(self) -> Context:
        """A context in which `SERVED_CALL` is this call."""
        context = copy_context()
        context.run(SERVED_CALL.set, self)
        return context


SERVED_CALL: ContextVar[ServedCall | None] = ContextVar("served", default=None)
"""The call that the running task serves."""
