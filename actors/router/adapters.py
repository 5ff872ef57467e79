"""LoRA adapters of running engines: the model of each adapter, and changes on all engines.

A loaded adapter has a record, from which later engines load it (`actors/engine/adapters.py`).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from actors.adapter_records import AdapterRecord, AdapterRecords
from actors.errors import TandemError, UnavailableError
from actors.router.model_router import ModelRouter
from configs.settings.base import RoleName

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHANGE_S = 120.0
"""Timeout in seconds of a change on one engine, which may read an adapter from a slow disk."""

REVERT_S = 10.0
"""Timeout in seconds of an unload on one engine, which only changes the list of its adapters."""

NAMES_AGE_S = 5.0
"""Age in seconds of the known names of adapters at which a lookup reads them again."""

MOST_KNOWN = 10_000
"""Number of recorded adapters whose model is remembered."""

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


class AdapterNameError(TandemError):
    """The name of an adapter is taken, or belongs to the configuration."""


class Adapters:
    """Models by adapter name: adapters of the configuration, and recorded ones."""

    def __init__(self, models: Sequence[ModelRouter], records: AdapterRecords | None) -> None:
        """Use `records`; None if clients may not load adapters of any model."""
        self.records = records
        self._models = {model.suffix: model for model in models}
        self._configured = {name: model for model in models for name in model.adapters}
        self._known: dict[str, tuple[ModelRouter, float]] = {}
        """Model of each recorded adapter, and `time.monotonic` of the reading."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def model_of(self, name: str) -> ModelRouter | None:
        """Return the model that has the adapter `name`, or None.

        Reads the record if the name is unknown, or was read more than NAMES_AGE_S ago. Raises
        UnavailableError if an unknown name's record cannot be read.
        """
        if name in self._configured or self.records is None:
            return self._configured.get(name)
        known, read_at = self._known.get(name, (None, 0.0))
        if known is not None and time.monotonic() - read_at < NAMES_AGE_S:
            return known
        try:
            record = await self.records.get(name)
        except UnavailableError:
            if known is not None:
                return known
            raise
        self.forget(name)
        if record is None or record.model not in self._models:
            return None
        self._known[name] = self._models[record.model], time.monotonic()
        if len(self._known) > MOST_KNOWN:
            self.forget(next(iter(self._known)))
        return self._models[record.model]

    def forget(self, name: str) -> None:
        """Make the next lookup of `name` read its record, after a change."""
        self._known.pop(name, None)

    async def load(self, model: ModelRouter, name: str, path: str, is_3d: bool = False) -> None:
        """Record an adapter and load it on all engines of `model`. If that fails, take both back.

        ``is_3d``  `is_3d_lora_weight` of the client's request, for vLLM

        Raises AdapterNameError if the service has an adapter of this name, UnavailableError if the
        records or an engine do not answer or no decode engine runs, AdapterError if all engines
        answer, and some with an error.
        """
        assert self.records is not None, "clients may load adapters of this model"
        self._refuse_configured(name)
        record = AdapterRecord(model.suffix, path, is_3d, uuid.uuid4().hex)
        try:
            added = await self.records.add(name, record)
        except BaseException:  # also after a cancellation: the operation continues
            self._in_background(self._remove(name, record))
            raise
        if not added:
            raise AdapterNameError(f"The lora adapter '{name}' has already been loaded. Unload it first.")
        done = False
        try:
            replies = await _tell(model, "load_adapter", name, path, is_3d)
            failed = {engine: reply for engine, reply in replies.items() if reply is not None}
            if not failed:
                done = True
                return
        finally:
            self.forget(name)
            left = "" if done else await asyncio.shield(self._in_background(self._take_back(model, name, record)))
        raise _error(
            failed, len(replies), f"{left} may have loaded it" if left else "it is loaded on none of the others"
        )

    def _refuse_configured(self, name: str) -> None:
        """Raise AdapterNameError for an adapter that each new engine loads at its start."""
        if name in self._configured:
            raise AdapterNameError(f"'{name}' is an adapter of the configuration; change `frontend.lora_modules`")

    async def _take_back(self, model: ModelRouter, name: str, record: AdapterRecord) -> str:
        """Delete the record of a failed load, and unload the adapter.

        Return the engines that do not answer, for a message.
        """
        await self._remove(name, record)
        replies = await model.tell_engines("unload_adapter", REVERT_S, name)
        silent = [f"{role} {replica}" for (role, replica), one in replies.items() if isinstance(one, Exception)]
        return ", ".join(silent)

    async def _remove(self, name: str, record: AdapterRecord) -> None:
        assert self.records is not None
        try:
            await self.records.remove(name, record)
        except UnavailableError as error:
            logger.warning("cannot delete the record of the adapter %s, whose load failed: %s", name, error)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run `work` to its end, also if the client leaves."""
        task = asyncio.create_task(work, name="takes-back-an-adapter")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def unload(self, model: ModelRouter, name: str) -> None:
        """Delete an adapter's record and unload it on all engines; running requests keep it.

        Raises AdapterNameError for an adapter of the configuration, AdapterError if all engines
        answer with an error, for example because none has it, UnavailableError if the records or an
        engine do not answer or no decode engine runs.
        """
        self._refuse_configured(name)
        record = None if self.records is None else await self.records.get(name)
        if record is not None and self.records is not None:
            if record.model != model.suffix:
                raise AdapterNameError(f"'{name}' is an adapter of another model")
            await self.records.delete(name)
        self.forget(name)
        replies = await _tell(model, "unload_adapter", name)
        failed = {engine: reply for engine, reply in replies.items() if reply is not None}
        if len(failed) == len(replies) or any(isinstance(reply, Exception) for reply in failed.values()):
            others = "the other engines have unloaded it"
            raise _error(
                failed, len(replies), others if len(failed) < len(replies) else "none has confirmed the unload"
            )


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
