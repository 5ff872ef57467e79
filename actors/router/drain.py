"""Drain one engine for an operator: it refuses new calls, and moves or hands back running ones."""

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.errors import LastEngineError, UnavailableError, UnknownEngineError
from actors.router.model_router import ModelRouter

LAST_ENGINE = "no other decode engine of this model accepts calls; start one first"


async def drain_engine(models: Sequence[ModelRouter], engine: str, on: bool | None, timeout_s: float) -> dict[str, Any]:
    """Drain the engine whose replica id begins with `engine`, or undo that, or (None) do neither.

    Returns its state.

    Raises UnknownEngineError unless exactly one engine that answers has such an id, LastEngineError
    if the model has no other decode engine, UnavailableError if the engine does not answer.
    """
    asked = await asyncio.gather(*(model.tell_engines("drain", timeout_s, None) for model in models))
    states = [
        (model, name, state)
        for model, replies in zip(models, asked, strict=True)
        for (_, name), state in replies.items()
        if not isinstance(state, Exception)
    ]
    found = [one for one in states if one[2]["replica"].startswith(engine)]
    if len(found) != 1:
        names = ", ".join(sorted(f"{state['role']} {state['replica']}" for *_, state in states)) or "none"
        raise UnknownEngineError(f"{len(found)} engines have an id that begins with {engine!r}; engines: {names}")
    model, name, state = found[0]
    if on in (None, state["drained"]):
        return state
    last = on and state["role"] == "decode"
    if last and not await _others_accept(model, name, timeout_s):
        raise LastEngineError(LAST_ENGINE)
    pool = model.pools[state["role"]]
    reply = (await pool.tell_all("drain", timeout_s, on, only=name)).get(name)
    if not isinstance(reply, dict):
        raise UnavailableError(f"the engine {name} does not answer; try again") from reply
    if last and not await _others_accept(model, name, timeout_s):  # another drain at the same time
        await pool.tell_all("drain", timeout_s, False, only=name)
        raise LastEngineError(LAST_ENGINE)
    return reply


async def _others_accept(model: ModelRouter, name: str, timeout_s: float) -> bool:
    """Return whether a decode replica other than that of `name` accepts calls.

    One of an earlier release does not know drains, and accepts.
    """
    pool = model.pools["decode"]
    replies = await pool.tell_all("drain", timeout_s, None)
    drained = [other for other, reply in replies.items() if isinstance(reply, dict) and reply["drained"]]
    refusing = set[str]().union(*(pool.same_replica(one) for one in (name, *drained)))
    return bool(pool.ongoing().keys() - refusing)
