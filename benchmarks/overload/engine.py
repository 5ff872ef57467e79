"""A simulated engine: decode slots, KV blocks with preemption, and steps that grow with the batch.

    python -m benchmarks.overload.engine 9000

It schedules as vLLM does: first come, first served; a prompt starts when its blocks are free; if a
sequence needs a block and none is free, the last one is preempted and computed again. An answer has
`answer_tokens` tokens, a field that routers do not read. Times are real, nothing is computed or
moved: a file for each transfer tells decode that prefill has computed the prompt.
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
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.replay_log import SERVED_CALL
from actors.request import TRANSFER_FIELD
from app.http.client_writer import until_disconnect
from benchmarks.router.engine import HANDED_OVER, MODEL, health, models

MAX_NUM_SEQS, KV_TOKENS, BLOCK_TOKENS, TEXT_BYTES = 16, 8192, 16, 4
STEP_S, SEQUENCE_S, PROMPT_TOKENS_PER_S = 0.02, 0.001, 12_000.0
"""Time of an empty step, of each decoding sequence in it, and speed of prompts."""
STEP_TOKENS = 2048
"""Most prompt tokens of a step (vLLM's `max_num_batched_tokens`)."""
ARRIVED = Path(tempfile.gettempdir()) / "tandem-overload"


@dataclass(eq=False)
class Sequence:
    context: int
    to_compute: int
    tokens: int
    transfer: Path | None = None
    made: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    sampled: int = 0
    preempted: int = 0

    def decodes(self) -> bool:
        if self.transfer is not None and self.transfer.exists():
            self.transfer.unlink()
            self.transfer = None
        return not self.to_compute and self.transfer is None


class Engine:
    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._stepping: asyncio.Task[None] | None = None

    async def serve(self, one: Sequence) -> AsyncGenerator[int, None]:
        self.waiting.append(one)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run())
        try:
            for _ in range(one.tokens):
                yield await one.made.get()
        finally:
            for queue in (self.waiting, self.running):
                if one in queue:
                    queue.remove(one)

    def _free(self, *more: Sequence) -> int:
        used = sum(math.ceil((one.context + 1) / BLOCK_TOKENS) for one in (*self.running, *more))
        return KV_TOKENS // BLOCK_TOKENS - used

    async def _run(self) -> None:
        due = time.monotonic()
        while self.waiting or self.running:
            while self.waiting and len(self.running) < MAX_NUM_SEQS and self._free(self.waiting[0]) >= 0:
                self.running.append(self.waiting.popleft())
            while self._free() < 0 and len(self.running) > 1:
                last = self.running.pop()
                last.to_compute, last.preempted, last.transfer = last.context, last.preempted + 1, None
                self.waiting.appendleft(last)
            left = STEP_TOKENS
            for one in self.running:
                computed = min(one.to_compute, left)
                one.to_compute -= computed
                left -= computed
            decoding = [one for one in self.running if one.decodes()]
            due += STEP_S + SEQUENCE_S * len(decoding) + (STEP_TOKENS - left) / PROMPT_TOKENS_PER_S
            await asyncio.sleep(max(due - time.monotonic(), 0))
            due = max(due, time.monotonic() - 5.0)  # catches up with a pause of the machine
            for one in decoding:
                one.sampled += 1
                one.context += 1
                one.made.put_nowait(one.sampled)
                if one.sampled == one.tokens and one in self.running:
                    self.running.remove(one)


async def to_end(events: AsyncGenerator[bytes, None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


def simulated() -> Starlette:
    engine = Engine()
    ARRIVED.mkdir(exist_ok=True)

    async def complete(request: Request) -> Response:
        body = json.loads(await request.body())
        transfer = body.get(TRANSFER_FIELD) or {}
        produces, consumes = (bool(transfer.get(name)) for name in ("do_remote_decode", "do_remote_prefill"))
        moved = ARRIVED / transfer["transfer_id"] if transfer.get("transfer_id") else None
        prompt, tokens = len(body["prompt"]) // TEXT_BYTES, 1 if produces else body["answer_tokens"]
        sequence = Sequence(prompt, 0 if consumes else prompt, tokens, moved if consumes else None)
        head = {"id": "cmpl-simulated", "object": "text_completion", "created": 0, "model": MODEL}
        head |= {"choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}]}
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        served = SERVED_CALL.get()

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing(engine.serve(sequence)) as made:
                async for sampled in made:
                    if served is not None:
                        served.record([sampled])
                    last = {"usage": usage, "preempted": sequence.preempted} if sampled == tokens else {}
                    yield b"data: %s\n\n" % json.dumps(head | last).encode()
            yield b"data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        with suppress(ClientDisconnect):  # vLLM, too, aborts the request
            await until_disconnect(request.scope, request.receive, to_end(events()))
        if produces and moved is not None:
            moved.touch()
        more = {TRANSFER_FIELD: HANDED_OVER} if produces else {}
        return JSONResponse({**head, "usage": usage, "preempted": sequence.preempted, **more})

    routes = {"/v1/completions": (complete, "POST"), "/v1/models": (models, "GET"), "/health": (health, "GET")}
    return Starlette(routes=[Route(path, answer, methods=[method]) for path, (answer, method) in routes.items()])


if __name__ == "__main__":
    app = simulated()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", loop="uvloop", http="httptools")
