"""Behaviours of engines for the router's tests, and the real router over in-process handles."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from actors.errors import EngineDownError
from actors.request import TRANSFER_FIELD, Call, Heartbeat, ResponseStart, TokenChunk, TokenGroup, TokenSource
from actors.router.client_request import ClientRequest
from actors.router.router import Router
from configs.settings.router import RouterLimits, RoutingSettings
from testing.answers import whole_body
from tests.actors.fleet import SOURCE, Handle, Replica, router_of

JSON = ((b"content-type", b"application/json"),)
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)
TOKENS = 40
ALL = "".join(f"<{token}>" for token in range(TOKENS))
LIMITS = RouterLimits(routing=RoutingSettings(policy="round_robin"))
"""Default settings except the policy; a test of a timeout sets the timeout."""


def request(stream: bool = True, **more: Any) -> ClientRequest:
    body = {"prompt": "a prompt", "stream": stream, **more}
    # The default factories are the real clock, also in `virtual_time`.
    now = time.monotonic()
    return ClientRequest("/v1/completions", (), json.dumps(body).encode(), body, arrived_at=now, read_at=now)


def event(created: int, usage: dict[str, int] | None = None, **choice: Any) -> bytes:
    head = {"id": "cmpl-1", "object": "text_completion", "created": created, "model": "m"}
    body = {**head, "choices": [choice] if choice else [], "usage": usage}
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


def groups_of(sizes: list[int], replay_log: tuple[TokenGroup, ...]) -> list[TokenGroup]:
    """Return the tokens 0 to 39 as a replay log, then in groups of `sizes`, in turn."""
    groups = list(replay_log)
    while (begin := sum(map(len, groups))) < TOKENS:
        size = sizes[len(groups) % len(sizes)]
        groups.append(tuple(range(begin, min(begin + size, TOKENS))))
    return groups


def engine(
    created: int,
    sizes: list[int],
    dies_after: int | None = None,
    half: bool = False,
    prompt: bytes | None = None,
    source: TokenSource | None = SOURCE,
) -> Any:
    """Return a decode engine that streams forty tokens, one event per group, and repeats a replay
    log first.

    It dies after `dies_after` tokens; with `half`, in the middle of the event after them. `prompt`
    is the digest of the prompt that it computes, `source` the identity that it reports.
    """

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield b": ping\n\n"
        sent = 0
        for group in groups_of(sizes, call.replay_log):
            text = "".join(f"<{token}>" for token in group)
            data = b"" if sent else event(created, index=0, role="assistant", text="")
            data += event(created, index=0, text=text, finish_reason="length" if TOKENS - 1 in group else None)
            origin = (None, None) if sent else (prompt, source)
            if dies_after is not None and sent + len(group) > dies_after:
                if half:
                    yield TokenChunk(data[: len(data) // 2], (group,), None, *origin)
                raise EngineDownError("killed")
            yield TokenChunk(data, (group,), None, *origin)
            sent += len(group)
        yield event(created, usage={"completion_tokens": sent}) + b"data: [DONE]\n\n"

    return serve


def answers(status: int, body: dict[str, Any], delay_s: float = 0.0) -> Any:

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(delay_s)
        yield ResponseStart(status, JSON)
        yield json.dumps(body).encode()

    return serve


def dies(call: Call, _: int) -> AsyncGenerator[Any, None]:
    async def serve() -> AsyncGenerator[Any, None]:
        raise EngineDownError("dead")
        yield

    return serve()


def hangs(call: Call, _: int) -> AsyncGenerator[Any, None]:
    async def serve() -> AsyncGenerator[Any, None]:
        await asyncio.sleep(60)
        yield

    return serve()


def fed(serve: Any, prefill: Handle) -> Any:
    """Return a decode engine that waits for its KV if the call names a producer."""

    async def wait(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        if TRANSFER_FIELD.encode() in call.body:  # a form has no `messages`
            transfer = json.loads(call.body)[TRANSFER_FIELD]
            delivered = asyncio.ensure_future(prefill.delivered[transfer["transfer_id"]].wait())
            try:
                while not (await asyncio.wait({delivered}, timeout=0.1))[0]:
                    yield Heartbeat()
            finally:
                delivered.cancel()
        async for item in serve(call, turn):
            yield item

    return wait


def prefills(handle: Callable[[], Handle]) -> Any:
    """Return a prefill engine that delivers its KV; its call is held."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        handle().delivered[json.loads(call.body)[TRANSFER_FIELD]["transfer_id"]].set()
        yield ResponseStart(200, JSON)
        yield b"{}"
        await asyncio.sleep(60)

    return serve


def fleet(prefill: list[Any], decode: list[Any]) -> tuple[Router, Handle, Handle]:
    """Return the router before these replicas; `well` among the prefill behaviours is a working
    engine.
    """
    p = Handle([])
    p.replicas = [Replica(f"p{n}", prefills(lambda: p) if serve is well else serve) for n, serve in enumerate(prefill)]
    d = Handle([Replica(f"d{n}", fed(serve, p)) for n, serve in enumerate(decode)])
    return router_of(LIMITS, p, d), p, d


def well() -> None:
    """Placeholder for a working prefill engine."""


async def ask(router: Router, wanted: ClientRequest) -> tuple[Any, bytes]:
    """Return the answer as the HTTP layer receives it, to its end."""
    async with router.answer(wanted) as answer:
        return answer, await whole_body(answer)


def transfers(handle: Handle) -> list[str]:
    bodies = [json.loads(call.body) for call in handle.calls]
    return [body[TRANSFER_FIELD]["transfer_id"] for body in bodies if TRANSFER_FIELD in body]


def counted(router: Router, name: str, **labels: str) -> float:
    return router.metrics.registry.get_sample_value(name, labels) or 0.0


WHOLE = {"text": "right"}
OK = answers(200, WHOLE)


async def cut_off(call: Call, _: int) -> AsyncGenerator[Any, None]:
    """Send half of a body, then die."""
    yield ResponseStart(200, JSON)
    yield b'{"text": '
    raise EngineDownError("killed")
