"""A simulated engine: decode slots, KV blocks with preemption, and steps that grow with the batch.

    python -m benchmarks.overload.engine 9000

It schedules as vLLM does: first come, first served; a prompt starts when its blocks are free; if a
running sequence needs a block and none is free, the last one is preempted and computed again. The
client decides in `answer_tokens` how long an answer is, which the router does not read; `max_tokens`
is its limit. Times are real, nothing is computed or moved: a file for each transfer tells decode
that prefill has computed the prompt.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.replay_log import SERVED_CALL
from actors.request import TRANSFER_FIELD
from benchmarks.router.engine import HANDED_OVER, MODEL, freeze_gc, health, models

MAX_NUM_SEQS = 16
BLOCK_TOKENS = 16
KV_TOKENS = 8192
STEP_S, SEQUENCE_S = 0.02, 0.001
"""Time of a decode step without sequences, and of each sequence in it."""
PROMPT_TOKENS_PER_S = 12_000.0
STEP_TOKENS = 2048
"""Most prompt tokens of a step (vLLM's `max_num_batched_tokens`)."""
TEXT_BYTES = 4
ARRIVED = Path(tempfile.gettempdir()) / "tandem-overload"


@dataclass(eq=False)
class Sequence:
    to_compute: int
    context: int
    tokens: int
    transfer: Path | None = None
    made: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    sampled: int = 0
    preempted: int = 0

    def decodes(self) -> bool:
        """Return whether the next step samples a token; vLLM, too, polls for KV at every step."""
        if self.transfer is not None and self.transfer.exists():
            self.transfer.unlink()
            self.transfer = None
        return not self.to_compute and self.transfer is None

    @property
    def blocks(self) -> int:
        return math.ceil((self.context + 1) / BLOCK_TOKENS)


class Engine:
    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._stepping: asyncio.Task[None] | None = None

    async def serve(self, one: Sequence) -> AsyncGenerator[Sequence, None]:
        """Yield the sequence after each of its tokens."""
        self.waiting.append(one)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run())
        try:
            for _ in range(one.tokens):
                await one.made.get()
                yield one
        finally:
            for queue in (self.waiting, self.running):
                if one in queue:
                    queue.remove(one)

    def _free(self) -> int:
        return KV_TOKENS // BLOCK_TOKENS - sum(one.blocks for one in self.running)

    async def _run(self) -> None:
        due = time.monotonic()
        while self.waiting or self.running:
            while self.waiting and len(self.running) < MAX_NUM_SEQS and self.waiting[0].blocks <= self._free():
                self.running.append(self.waiting.popleft())
            while self._free() < 0 and len(self.running) > 1:
                last = self.running.pop()
                last.to_compute, last.preempted = last.context, last.preempted + 1
                last.transfer = None
                self.waiting.appendleft(last)
            left = STEP_TOKENS
            for one in self.running:
                computed = min(one.to_compute, left)
                one.to_compute -= computed
                left -= computed
            decodes = [one for one in self.running if one.decodes()]
            due += STEP_S + SEQUENCE_S * len(decodes) + (STEP_TOKENS - left) / PROMPT_TOKENS_PER_S
            await asyncio.sleep(max(due - time.monotonic(), 0))
            for one in decodes:
                one.sampled += 1
                one.context += 1
                one.made.put_nowait(one.sampled)
                if one.sampled == one.tokens and one in self.running:
                    self.running.remove(one)
            due = max(due, time.monotonic() - 1.0)


async def to_end(request: Request, answer: AsyncGenerator[Sequence, None]) -> Sequence | None:
    """Return the finished sequence; None after the client's disconnect, which aborts it, as in vLLM."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def last() -> Sequence | None:
        found = None
        async with aclosing(answer):
            async for found in answer:
                pass
        return found

    tasks = asyncio.create_task(last()), asyncio.create_task(disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


def simulated() -> Starlette:
    engine = Engine()
    ARRIVED.mkdir(exist_ok=True)

    async def complete(request: Request) -> Response:
        body = json.loads(await request.body())
        transfer = body.get(TRANSFER_FIELD) or {}
        produces, consumes = (bool(transfer.get(name)) for name in ("do_remote_decode", "do_remote_prefill"))
        moved = ARRIVED / transfer["transfer_id"] if transfer.get("transfer_id") else None
        prompt_tokens = max(len(body["prompt"]) // TEXT_BYTES, 1)
        most = int(body.get("max_tokens", 16))
        tokens = 1 if produces else max(min(int(body.get("answer_tokens", most)), most), 1)
        sequence = Sequence(0 if consumes else prompt_tokens, prompt_tokens, tokens, moved if consumes else None)
        made = engine.serve(sequence)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        head = {"id": "cmpl-simulated", "object": "text_completion", "created": 0, "model": MODEL}
        choice: dict[str, Any] = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
        served = SERVED_CALL.get()

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing(made) as answer:
                async for one in answer:
                    if served is not None:
                        served.record([one.sampled])
                    last = {"usage": usage, "preempted": one.preempted} if one.sampled == tokens else {}
                    yield b"data: %s\n\n" % json.dumps({**head, "choices": [choice], **last}).encode()
            yield b"data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        if await to_end(request, made) is None:
            return Response(status_code=499)
        if produces and moved is not None:
            moved.touch()
        choice |= {"text": " token" * tokens, "finish_reason": "length"}
        more = {TRANSFER_FIELD: HANDED_OVER} if produces else {}
        return JSONResponse({**head, "choices": [choice], "usage": usage, "preempted": sequence.preempted, **more})

    return Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ]
    )


if __name__ == "__main__":
    freeze_gc()
    app = simulated()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", loop="uvloop", http="httptools")
