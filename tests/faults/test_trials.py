"""The driver against servers that answer, close the connection, or send nothing: real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.campaigns.faults.judge import Outcome, judge
from tests.campaigns.faults.trials import Question, Router, Trial

QUESTION = Question("mira=427\nmira?", 9, "427;")
BOUND_S = 0.3
WAIT_S = 60.0
"""Time limit for servers that answer, far above a pause of the machine."""
FOREVER = object()
BREAK = object()
PARAMS = {"kv_transfer_params": {"do_remote_prefill": True}}


@contextlib.asynccontextmanager
async def server(status: int, *said: object, heads: list[bytes] | None = None) -> AsyncIterator[str]:
    """Start a server that answers every request with ``said``, until it closes the connection or
    stops sending.

    ``heads`` has the requests' first lines and headers.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if heads is not None:
                heads.append(head)
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(f"HTTP/1.1 {status} x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for thing in said:
                if thing is FOREVER:
                    await reader.read()
                if thing is BREAK:
                    writer.transport.abort()
                    return
                text = str(thing).encode()
                writer.write(b"%x\r\n%s\r\n" % (len(text), text))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


def event(text: str, finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': finish}]})}\n\n"


DONE = "data: [DONE]\n\n"
ERROR = 'data: {"error": {"message": "the transfer failed"}}\n\n'


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        (200, [event("427"), event(";", "length"), DONE], Outcome.RIGHT),
        (200, [event("093"), event(";", "length"), DONE], Outcome.WRONG),
        (200, [event("09"), BREAK], Outcome.WRONG),
        (200, [event("427"), BREAK], Outcome.REFUSED),
        (200, [event("427")], Outcome.REFUSED),
        (200, [ERROR, DONE], Outcome.REFUSED),
        (500, ["no"], Outcome.REFUSED),
        (200, [BREAK], Outcome.REFUSED),
        (200, [FOREVER], Outcome.HANG),
        (200, [event("427"), FOREVER], Outcome.HANG),
    ],
)
async def test_a_decode_server_s_behaviour_is_told(status: int, said: list[object], outcome: Outcome) -> None:
    """The outcomes are the same for every connector."""
    trial = Trial(QUESTION)
    prefill_server, decode_server = server(200, json.dumps(PARAMS)), server(status, *said)
    async with prefill_server as prefill, decode_server as decode, httpx.AsyncClient(timeout=None) as client:
        await Router(client, prefill, decode, WAIT_S if FOREVER not in said else BOUND_S).in_turn(trial)
    assert judge(trial) is outcome
    assert trial.params == PARAMS["kv_transfer_params"]


@pytest.mark.parametrize("said", [(503, "busy"), (200, BREAK), (200, "{}")])
async def test_a_failed_prefill_leg_is_a_refusal_and_decode_is_not_asked(said: tuple[int, object]) -> None:
    """A plain sequential proxy does the same."""
    trial = Trial(QUESTION)
    async with server(*said) as prefill, httpx.AsyncClient(timeout=None) as client:
        await Router(client, prefill, "http://127.0.0.1:9", WAIT_S).in_turn(trial)
    assert judge(trial) is Outcome.REFUSED
    assert "decode_sent" not in trial.timestamps


async def test_both_legs_carry_one_request_id() -> None:
    """vLLM's own proxies do the same: NixlPushConnector matches its two ends by this id only."""
    trial = Trial(QUESTION)
    heads: list[bytes] = []
    whole = [event("427"), event(";", "length"), DONE]
    prefill_server, decode_server = server(200, json.dumps(PARAMS), heads=heads), server(200, *whole, heads=heads)
    async with prefill_server as prefill, decode_server as decode, httpx.AsyncClient(timeout=None) as client:
        await Router(client, prefill, decode, WAIT_S).in_turn(trial)
    assert len(heads) == 2
    assert all(f"x-request-id: {trial.request_id}\r\n".encode() in head.lower() for head in heads)


async def test_time_stands_still_while_the_decode_server_is_stopped() -> None:
    """The limit starts again when the server continues."""
    trial = Trial(QUESTION)
    async with server(200, FOREVER) as decode, httpx.AsyncClient(timeout=None) as client:
        router = Router(client, decode, decode, BOUND_S)
        router.pause()
        leg = asyncio.ensure_future(router.decode(trial, {}))
        done, _ = await asyncio.wait([leg], timeout=2 * BOUND_S)
        assert not done
        router.resume()
        await asyncio.wait_for(leg, WAIT_S)
    assert trial.gave_up == "decode"


async def test_a_cancelled_trial_is_the_driver_s_own_doing() -> None:
    """The driver cancelled the trial; the server did not hang."""
    trial = Trial(QUESTION)
    async with server(200, FOREVER) as silent, httpx.AsyncClient(timeout=None) as client:
        task = asyncio.ensure_future(Router(client, silent, silent, 60).at_once(trial, {}))
        await asyncio.wait([task], timeout=0.05)
        task.cancel()
        await asyncio.wait([task])
    assert judge(trial) is Outcome.CANCELLED
