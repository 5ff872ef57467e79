"""LoRA adapters of running engines: the model of each adapter, and changes on all engines."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from actors.errors import TandemError, UnavailableError
from actors.router.models.model_router import ModelRouter
from configs.settings.base import RoleName

CHANGE_S = 120.0
"""Timeout in seconds of a change on one engine, which may read an adapter from a slow disk."""

REVERT_S = 10.0
"""Timeout in seconds of a revert on one engine, which only changes the list of its adapters."""

NAMES_S = 2.0
"""Timeout in seconds of the call that reads the adapters of an engine."""

NAMES_AGE_S = 5.0
"""Age in seconds of the known names of adapters at which a lookup reads them again."""

Replies = Mapping[tuple[RoleName, str], Any]
"""Result by role and replica: None for success, an OpenAI error body, or an exception."""


class AdapterError(TandemError):
    """Engines answered a change of adapters with an error.

    ``body``  response for the client in OpenAI's format
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(str(body["error"]["message"]))
        self.body = body

    @property
    def status(self) -> int:
        return int(self.body["error"]["code"])


class AdapterNames:
    """Models by adapter name.

    The names are those loaded at engine start. For models whose adapters clients may change, the
    decode engines' last answer replaces them.
    """

    def __init__(self, models: Sequence[ModelRouter]) -> None:
        self._changing = [model for model in models if model.allows_adapters]
        self._names = {model: frozenset(model.adapters) for model in models}
        """Adapter names of each model: those of its start, or of its engines' last answer."""
        self._unanswered: list[ModelRouter] = []
        """Models whose engines did not answer in the last reading."""
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        """`time.monotonic` when the last valid reading began; -inf before the first one and after
        `forget`.
        """
        self._forgotten_at = float("-inf")
        """`time.monotonic` of the last `forget`. A reading that began earlier is not valid."""

    async def model_of(self, name: str) -> ModelRouter | None:
        """Return the model that has the adapter `name`, or None.

        Reads the engines' adapters first if the name is unknown, as another router may have just
        loaded it, or if the known names are older than NAMES_AGE_S. Raises UnavailableError if the
        name is then still unknown and the decode engines of a model have not answered.
        """
        if not self._with(name) or time.monotonic() - self._read_at > NAMES_AGE_S:
            await self._read()
        found = self._with(name)
        if not found and self._unanswered:
            raise self._unavailable(name)
        return found[0] if found else None

    async def models_of(self, name: str) -> list[ModelRouter]:
        """Return all models that have the adapter `name`, after asking the engines.

        Raises UnavailableError if the engines of a model do not answer.
        """
        await self._read()
        if self._unanswered:
            raise self._unavailable(name)
        return self._with(name)

    def forget(self) -> None:
        """Invalidate the cached names after a change; the next lookup reads them again."""
        self._read_at, self._forgotten_at = float("-inf"), time.monotonic()

    def _with(self, name: str) -> list[ModelRouter]:
        return [model for model, names in self._names.items() if name in names]

    def _unavailable(self, name: str) -> UnavailableError:
        unanswered = ", ".join(model.names[0] for model in self._unanswered if model.names) or "the model"
        return UnavailableError(
            f"`{name}` may be an adapter of {unanswered}, whose decode engines do not answer; retry later"
        )

    async def _read(self) -> None:
        """Read the names from the engines.

        Callers that wait while a reading runs share the next one.
        """
        arrived = time.monotonic()
        async with self._lock:
            if self._read_at > arrived:
                return
            began = time.monotonic()
            replies = await asyncio.gather(
                *(model.pools["decode"].ask_all("adapters", NAMES_S) for model in self._changing)
            )
            for model, answers in zip(self._changing, replies, strict=True):
                if answers:
                    self._names[model] = _loaded(answers)
            self._unanswered = [model for model, answers in zip(self._changing, replies, strict=True) if not answers]
            if began > self._forgotten_at:
                self._read_at = began


def _loaded(engines: Sequence[Mapping[str, tuple[int, str | None, bool]]]) -> frozenset[str]:
    """Return the names of adapters whose newest change in `engines` is a load.

    ``engines``  `AdapterStates` of each engine (`actors/engine/adapters.py`)
    """
    newest: dict[str, tuple[int, str | None, bool]] = {}
    for adapters in engines:
        for name, state in adapters.items():
            if name not in newest or state[0] > newest[name][0]:
                newest[name] = state
    return frozenset(name for name, (_, path, _) in newest.items() if path is not None)


async def load(model: ModelRouter, name: str, path: str, is_3d: bool = False) -> None:
    """Load an adapter on all engines of `model`. If some fail, ask all engines to revert the load.

    ``is_3d``  `is_3d_lora_weight` of the client's request, for vLLM

    Raises UnavailableError if an engine does not answer or no decode engine runs, AdapterError if
    all engines answer, and some with an error. An engine that has loaded the adapter and misses the
    revert keeps it until it reads the revert from a peer (`EngineAdapters.merge`). A replica that
    starts meanwhile loads the adapters of its peers.
    """
    version = time.time_ns()
    try:
        replies = await _tell(model, "load_adapter", name, path, is_3d, version)
    except UnavailableError as error:
        # Prefill engines may have loaded it.
        if unconfirmed := await _revert(model, name, version):
            raise UnavailableError(f"{error}; {unconfirmed} may have loaded the adapter") from None
        raise
    failed = {engine: reply for engine, reply in replies.items() if reply is not None}
    if not failed:
        return
    state = "it is loaded on none of the others"
    all_refused = len(failed) == len(replies) and not any(isinstance(reply, Exception) for reply in failed.values())
    if not all_refused and (unconfirmed := await _revert(model, name, version)):
        state = f"{unconfirmed} may have loaded it"
    raise _error(failed, len(replies), state)


async def _revert(model: ModelRouter, name: str, version: int) -> str:
    """Ask all engines to revert a load; return those that have not confirmed it, for a message."""
    replies = await model.tell_engines("revert_adapter", REVERT_S, name, version)
    return ", ".join(f"{role} {replica}" for (role, replica), reply in replies.items() if reply is not None)


async def unload(model: ModelRouter, name: str) -> None:
    """Unload an adapter on all engines of `model`; running requests keep it.

    Raises AdapterError if all engines answer with an error, for example because none has it,
    UnavailableError if an engine does not answer or no decode engine runs. An engine that does not
    answer applies its peers' change later (`EngineAdapters.merge`).
    """
    replies = await _tell(model, "unload_adapter", name, time.time_ns())
    failed = {engine: reply for engine, reply in replies.items() if reply is not None}
    if len(failed) == len(replies) or any(isinstance(reply, Exception) for reply in failed.values()):
        others = "the other engines have unloaded it" if len(failed) < len(replies) else "none has confirmed the unload"
        raise _error(failed, len(replies), others)


async def _tell(model: ModelRouter, method: str, *arguments: object) -> Replies:
    """Call `method` of all engines; then raise UnavailableError if none is a decode engine."""
    replies = await model.tell_engines(method, CHANGE_S, *arguments)
    if not any(role == "decode" for role, _ in replies):
        raise UnavailableError("no decode engine of this model runs; retry later")
    return replies


def _error(failed: Replies, engines: int, state: str) -> TandemError:
    """Return the error of a change that failed on some engines.

    ``engines``  number of engines that were asked
    ``state``    state of the adapter after the failure, for the message

    If all engines answer with the same error, returns it. Otherwise the message lists the errors,
    and the type is UnavailableError if an engine has not answered, else AdapterError.
    """
    refusals = [reply for reply in failed.values() if not isinstance(reply, Exception)]
    said = {reply["error"]["message"] for reply in refusals}
    if len(failed) == engines and len(refusals) == engines and len(said) == 1:
        return AdapterError(refusals[0])
    lines = "; ".join(
        f"{role} {replica}: {reply if isinstance(reply, Exception) else reply['error']['message']}"
        for (role, replica), reply in failed.items()
    )
    message = f"{len(failed)} of {engines} engines failed, {state}: {lines}"
    if len(refusals) < len(failed):
        return UnavailableError(message)
    return AdapterError({"error": {**refusals[0]["error"], "message": message}})
