"""Record a streamed answer as a replay log, from which another engine can resume it.

A token group is the token ids of one output of the engine core to vLLM's serving layer. The engine
sends each group to the router no later than the bytes that the serving layer generated from it. On
resume, another engine first emits the groups of the replay log, then continues.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from actors.errors import CannotResumeError, TandemError
from actors.request import FirstTokenChunk, ReplayLog, StreamChunk, TokenChunk, TokenGroup, TokenSource
from actors.telemetry.timestamps import CallTimestamps


@dataclass
class ServedCall:
    """A running call in its engine's actor: its replay log, new groups, timings and error.

    `data_parallel_rank` is the engine core that computes the call.
    """

    replay: ReplayLog = ()
    data_parallel_rank: int = 0
    problem: TandemError | None = None
    taken: Callable[[], None] = lambda: None
    """Called after the serving layer has processed an output."""
    timestamps: CallTimestamps = field(default_factory=CallTimestamps)
    first_token: asyncio.Future[None] | None = None
    """Done when the engine has sampled the first token of an answer that is not streamed.

    Never done if this token ends the answer. None: not reported.
    """
    prompt_tokens: int | None = None
    """Set with the first token that a prefill engine samples for the client; else None."""
    prompt_digest: bytes | None = None
    source: Callable[[], TokenSource | None] = lambda: None
    """Returns the identity of what computes the tokens; None while it is unknown."""
    split_first: bool = False
    """Whether the outputs of this call's next engine request pass through a `ReplayCollector`."""
    unfinished: bool = False
    """Whether another engine continues the answer, unless the first token ends it."""
    emitted: deque[int] = field(default_factory=deque)
    """Tokens that vLLM's frontend has to process before the engine's own first output."""
    prefilled: int = 0
    """Number of tokens of `replay` that the engine computes with the prompt."""
    transfer: Mapping[str, Any] | None = None
    """Parameters of the KV of the prompt and of `replay`; None: this engine computes them."""
    movable: bool = False
    """Whether another engine may continue the stream before its end."""
    moved: Callable[[Mapping[str, Any]], None] = lambda _: None
    """Called after the last output of a stream that moves, with the parameters of its KV."""
    recorded: int = 0
    """Number of tokens so far."""
    _sampled: bool = False
    _new: deque[TokenGroup] = field(default_factory=deque)
    _began: bool = False

    def begin(self) -> bool:
        """Return whether this is the call's first generation: only that one is recorded."""
        first, self._began = not self._began, True
        return first

    def record(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._new.append(tuple(tokens))
            self.recorded += len(tokens)

    @property
    def repeats(self) -> bool:
        """True while the outputs so far are of prefilled tokens: the engine may not have the KV."""
        return 0 < self.prefilled >= self.recorded

    def sampled(self) -> None:
        """Make the next chunk a StreamChunk, even if no token group is recorded."""
        self._sampled = True

    def sampled_first(self) -> None:
        if self.first_token is not None and not self.first_token.done():
            self.first_token.set_result(None)

    def chunk(self, body: bytes) -> bytes | StreamChunk:
        """Return `body` with the tokens and timings since the last chunk, or alone without any."""
        timings = self.timestamps.take_timings()
        if not self._sampled and not self._new and timings is None:
            return body
        self._sampled = False
        groups = tuple(self._new)
        self._new.clear()
        digest = source = None
        if groups:
            digest, self.prompt_digest = self.prompt_digest, None
            if (source := self.source()) is not None:
                self.source = lambda: None
        if self.prompt_tokens is not None:
            prompt_tokens, self.prompt_tokens = self.prompt_tokens, None
            return FirstTokenChunk(body, groups, timings, prompt_tokens, digest, source)
        prefilled = self.prefilled if groups and self.recorded == sum(map(len, groups)) else 0
        return TokenChunk(body, groups, timings, digest, source, prefilled)

    def fail(self, why: str) -> TandemError:
        return self.end(CannotResumeError(why))

    def end(self, problem: TandemError) -> TandemError:
        self.problem = problem
        return problem

    def check(self) -> None:
        """Raise the recorded error: vLLM's serving layer has converted it to a response."""
        if self.problem is not None:
            raise self.problem

    def context(self) -> Context:
        context = copy_context()
        context.run(SERVED_CALL.set, self)
        return context


SERVED_CALL: ContextVar[ServedCall | None] = ContextVar("served", default=None)
