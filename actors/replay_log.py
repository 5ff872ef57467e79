"""What a streamed answer consists of so far, so that another engine can go on with it.

The engine records the token ids of every step that it hands to vLLM's serving layer as one *group*; the groups
travel to the router with the bytes that the serving layer made of them. A call that carries such a journal makes
its engine emit exactly these groups again, and then go on. Pure but for the context variable and the stopwatch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field

from actors.errors import CannotResumeError
from actors.request import Chunk, Group, Journal
from actors.telemetry.timestamps import Stopwatch


@dataclass
class Served:
    """One call while its engine serves it: what to emit again, and what is recorded for the router."""

    replay: Journal = ()
    problem: CannotResumeError | None = None
    taken: Callable[[], None] = lambda: None
    """To be called when the serving layer has done with an output."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _new: deque[Group] = field(default_factory=deque)
    _began: bool = False

    def begin(self) -> bool:
        """Whether this is the call's first generation; only that one is recorded."""
        first, self._began = not self._began, True
        return first

    def record(self, tokens: Sequence[int]) -> None:
        """Note a group, before the serving layer sees it."""
        if tokens:
            self._new.append(tuple(tokens))

    def chunk(self, body: bytes) -> bytes | Chunk:
        """`body` with what has been recorded since the last chunk."""
        timings = self.stopwatch.tell()
        if not self._new and timings is None:
            return body
        groups = tuple(self._new)
        self._new.clear()
        return Chunk(body, groups, timings)

    def fail(self, why: str) -> CannotResumeError:
        """Note, and return, why the call cannot go on as it should."""
        self.problem = CannotResumeError(why)
        return self.problem

    def check(self) -> None:
        """Raise what `fail` has noted: vLLM's serving layer would make an answer of it."""
        if self.problem is not None:
            raise self.problem

    def context(self) -> Context:
        """A context in which `SERVED` is this call."""
        context = copy_context()
        context.run(SERVED.set, self)
        return context


SERVED: ContextVar[Served | None] = ContextVar("served", default=None)
"""The call that the running task serves."""
