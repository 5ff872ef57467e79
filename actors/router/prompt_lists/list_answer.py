"""Answer to a list of prompts, merged from the answers to one request per prompt."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus

from actors.errors import DeadlineError
from actors.request import Headers, ResponseStart
from actors.router.answer import Answer
from actors.router.client_request import ClientRequest
from actors.router.prompt_lists.merge import MergedStream, error_event, merged_body
from actors.router.prompt_lists.split import begun
from actors.router.relay import ClientWriter
from actors.router.request_shaping import choices_of
from actors.telemetry.latency_breakdown import LatencyBreakdown
from actors.telemetry.recent_requests import Pair
from configs.settings.base import RoleName

READY_PIECES = 64
"""Number of pieces (writes of `Answer.relay`), not yet passed on, at which the streams pause."""

Serve = Callable[[ClientRequest], AbstractAsyncContextManager[Answer]]
"""Function that serves the request of one prompt; its context yields the answer."""


class RefusedPromptError(Exception):
    """The decode engine answered a prompt with an error status."""


class ListAnswer:
    """Answer with the interface of `Answer`. Await `open`, `begin` and `relay`; always `close`.

    An error of one prompt is the error of the whole request, as in vLLM; `close` cancels the rest.
    At most `at_once` prompts run at a time. The status of a stream depends on its first `at_once`
    prompts, or on those that have started when READY_PIECES are unread. The error of a later prompt
    ends the stream: as its last event, or as an exception of `relay`.
    """

    start: ResponseStart

    def __init__(
        self, requests: Sequence[ClientRequest], parent_id: str, serve: Serve, at_once: int, idle_s: float
    ) -> None:
        self._requests = requests
        self._choices = choices_of(requests[0].body) or 1
        self._parent_id = parent_id
        self._serve = serve
        self._idle_s = idle_s
        self._at_once = asyncio.Semaphore(at_once)
        self._first_ones = at_once if requests[0].streams else len(requests)
        self._answers: dict[int, Answer] = {}
        self._heads: dict[int, bytes] = {}
        """First piece of each answer; the whole body if the answer is not a stream."""
        loop = asyncio.get_running_loop()
        self._decided: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]
        """One future per prompt, done once `open` need not wait for it: its answer has started or
        failed, or the queue is full."""
        self._pieces: deque[tuple[int, bytes] | Exception] = deque()
        self._arrived = asyncio.Event()
        self._parts = [_Part(self, index) for index in range(len(requests))]
        self.sent_bytes = 0
        self.usage = b""
        self._tasks: list[asyncio.Task[None]] = []
        self._lead = 0
        """Index of the prompt whose times and replicas the list reports: the lowest one with an
        error status among those for which `open` waits, else the lowest one with an answer."""

    @property
    def route(self) -> str:
        """Route of the request: `local` if decode alone served all prompts answered so far."""
        return "remote" if self.local_reason is None else "local"

    @property
    def local_reason(self) -> str | None:
        """Routing reason of the answered prompt of lowest index; None if `route` is `remote`."""
        reasons = [answer.local_reason for _, answer in sorted(self._answers.items())]
        return None if None in reasons else reasons[0]

    @property
    def sampled_by(self) -> RoleName | None:
        """Role of the engine that sampled the first token of the prompt at `_lead`.

        None with `first_token: decode`.
        """
        return self._answers[self._lead].sampled_by

    @property
    def first_byte_s(self) -> float:
        return self._answers[self._lead].first_byte_s

    @property
    def explanation(self) -> str | None:
        return self._answers[self._lead].explanation

    @property
    def pair(self) -> Pair:
        return self._answers[self._lead].pair

    @property
    def prompt_tokens(self) -> int | None:
        """Number of tokens of all prompts answered so far; None if a prompt's number is unknown."""
        return _sum([answer.prompt_tokens for answer in self._answers.values()])

    @property
    def completion_tokens(self) -> int | None:
        """Number of tokens of all streams so far; None if a stream's number is unknown."""
        return _sum([answer.completion_tokens for answer in self._answers.values()])

    @property
    def breakdown(self) -> LatencyBreakdown:
        return self._answers[self._lead].breakdown

    @property
    def accounted(self) -> bool:
        return self._answers[self._lead].accounted

    async def account(self, at_most_s: float) -> None:
        """Wait at most `at_most_s` seconds until `accounted` is true for the lead prompt."""
        await self._answers[self._lead].account(at_most_s)

    async def open(self) -> None:
        """Start the prompts; return when the first ones have answers, or one has an error status.

        The first ones are `at_once` prompts of a stream, else all prompts. Also returns when the
        queue of pieces is full. The prompts that have started would otherwise hold their slots
        until the others have slots. Raises the error of a prompt, among the first ones, that gets
        no answer.
        """
        self._tasks = [
            asyncio.create_task(self._run(index, request), name=f"prompt-{index}-{self._parent_id}")
            for index, request in enumerate(self._requests)
        ]
        first = self._decided[: self._first_ones]
        await asyncio.wait(first, return_when=asyncio.FIRST_EXCEPTION)
        self._lead = min(self._answers, default=0)
        for index, decided in enumerate(first):
            error = decided.exception() if decided.done() else None
            if isinstance(error, RefusedPromptError):
                self._lead = index
                break
            if error is not None:
                raise error
        self.start = self._answers[self._lead].start

    async def begin(self) -> bytes:
        """Return the first events of a stream, or the complete body of another answer.

        After `open` has returned, raises the error of a prompt whose stream breaks, or that gets no
        answer. Raises ValueError for an error response that is not JSON.
        """
        answer_id = f"cmpl-{self._parent_id}"
        if self.start.status >= HTTPStatus.BAD_REQUEST:
            return self._whole(self._heads[self._lead])
        if not self.start.streams:
            heads = [self._heads[index] for index in range(len(self._requests))]
            return self._whole(merged_body(heads, answer_id))
        self.start = ResponseStart(self.start.status, self._headers())
        self._merged = MergedStream(len(self._requests), self._choices, answer_id)
        while not (events := self._merged.feed(*await self._next())):
            pass
        return events

    async def relay(self, writer: ClientWriter) -> None:
        """Send the rest of a stream. Raises as `begin` does."""
        while not self._merged.done:
            if events := self._merged.feed(*await self._next()):
                await self._writable(writer)
                writer.write(events)
                self.sent_bytes += len(events)

    async def _next(self) -> tuple[int, bytes]:
        while not self._pieces:
            self._arrived.clear()
            await self._arrived.wait()
        piece = self._pieces.popleft()
        if not self.full:
            for part in self._parts:
                if part.on_resume is not None:
                    part.on_resume()
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def _writable(self, writer: ClientWriter) -> None:
        """Wait until the client takes data. Raises DeadlineError after `idle_timeout_s`."""
        if not writer.paused:
            return
        writable = asyncio.Event()
        writer.on_resume = writable.set
        try:
            async with asyncio.timeout(self._idle_s):
                await writable.wait()
        except TimeoutError:
            raise DeadlineError(f"the client read nothing of the stream for {self._idle_s:g} s") from None
        finally:
            writer.on_resume = None

    @property
    def full(self) -> bool:
        """True if the streams of the prompts must pause."""
        return len(self._pieces) >= READY_PIECES

    def put(self, piece: "tuple[int, bytes] | Exception") -> None:
        """Queue a piece of a prompt's stream, or an error that ends the answer."""
        self._pieces.append(piece)
        self._arrived.set()
        if self.full:
            _decide(self._decided)

    async def close(self) -> None:
        """Cancel the running calls of all prompts."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _whole(self, body: bytes) -> bytes:
        length = (b"content-length", str(len(body)).encode())
        self.start = ResponseStart(self.start.status, (*self._headers(), length))
        return body

    def _headers(self) -> Headers:
        """Return the response headers of the prompt at `_lead`, without Content-Length.

        X-Request-Id has the list's request id.
        """
        kept = [(name, value) for name, value in self.start.headers if name != b"content-length"]
        return tuple((name, self._parent_id.encode() if name == b"x-request-id" else value) for name, value in kept)

    async def _run(self, index: int, request: ClientRequest) -> None:
        decided = self._decided[index]
        try:
            async with self._at_once, self._serve(begun(request)) as answer:
                head = await answer.begin()
                self._answers[index], self._heads[index] = answer, head
                if answer.start.status >= HTTPStatus.BAD_REQUEST:
                    raise RefusedPromptError
                _decide([decided])
                if answer.start.streams:
                    self.put((index, head))
                    await answer.relay(self._parts[index])
        except Exception as error:
            if not decided.done():
                decided.set_exception(error)
                decided.exception()  # retrieve it: asyncio logs exceptions that no task awaits
            last: tuple[int, bytes] | Exception = error
            if isinstance(error, RefusedPromptError):
                try:
                    last = index, error_event(self._heads[index])
                except ValueError as unreadable:  # from a middleware; vLLM's errors are JSON
                    last = unreadable
            self.put(last)


class _Part:
    """ClientWriter of one prompt's stream."""

    def __init__(self, answer: ListAnswer, index: int) -> None:
        self.on_resume: Callable[[], None] | None = None
        self._answer = answer
        self._index = index

    @property
    def paused(self) -> bool:
        return self._answer.full

    def write(self, data: bytes) -> None:
        self._answer.put((self._index, data))


def _decide(prompts: Iterable[asyncio.Future[None]]) -> None:
    """Mark `prompts` as decided, except those that are already."""
    for decided in prompts:
        if not decided.done():
            decided.set_result(None)


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
