"""Drain one engine for an operator: it refuses new calls, and moves or hands back running ones."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from actors.errors import LastEngineError, UnavailableError, UnknownEngineError
from actors.router.model_router import ModelRouter

logger = logging.getLogger(__name__)


async def drain_engine(models: Sequence[ModelRouter], engine: str, on: bool, timeout_s: float) -> dict[str, Any]:
    """Drain the engine whose replica id begins with `engine`, or undo that; return its state.

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
    if on and state["role"] == "decode":
        others = [other for of, _, other in states if of is model and other is not state]
        if not any(other["role"] == "decode" and not other["drained"] for other in others):
            raise LastEngineError("no other decode engine of this model accepts calls; start one first")
    pool = model.pools[state["role"]]
    reply = (await pool.tell_all("drain", timeout_s, on, only=name)).get(name)
    if not isinstance(reply, dict):
        raise UnavailableError(f"the engine {name} does not answer; try again") from reply
    return reply
