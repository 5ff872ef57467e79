"""LoRA adapters of one engine, changed at run time and synchronized with its peers.

The peers of an engine are the other engines of its model. Each load or unload has a version,
normally the time at which the router began it. An unload that reverts a load, or whose router's
clock is behind, has the previous version + 1. An engine stores the newest change of each adapter
name, the latest UNLOADS_KEPT unloads included, and applies newer changes of its peers. So a replica
that starts, or that missed a change, gets its peers' adapters; it retries those that it cannot
load. When all engines have ended, adapters loaded at run time are lost, as in vLLM.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connectors.forgotten import ForgottenKeys

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    from actors.upstream.vllm_replaying_llm import ReplayingLLM

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 5.0
"""Interval in seconds at which an engine reads its peers' changes and applies them."""

UNLOADS_KEPT = 1000
"""Number of unloads that an engine stores. For other names it assumes an unload that is as new as
the newest one forgotten, so that no peer returns an unloaded adapter.
"""

FILES_KEPT = 100_000
"""Number of adapters, by last load, whose files an engine can compare at the next load."""

AdapterStates = Mapping[str, tuple[int, str | None, bool]]
"""(version, path, is_3d) of the `AdapterState` of each adapter, by adapter name."""


@dataclass(frozen=True)
class AdapterState:
    """Last change of one adapter.

    ``version``  Unix time in ns at which the router began the change; for an unload that reverts a
                 load, or whose router's clock is behind, the previous version + 1; 0 for an adapter
                 of the configuration
    ``path``     path of the adapter as vLLM receives it; None after an unload
    ``is_3d``    vLLM's `is_3d_lora_weight`; False after an unload
    """

    version: int
    path: str | None
    is_3d: bool = False


class EngineAdapters:
    """LoRA adapters of one engine, in vLLM's own registry of models."""

    def __init__(self, models: "OpenAIServingModels", llm: "ReplayingLLM", cpu_slots: int | None) -> None:
        """Record the adapters that `models` already has.

        ``cpu_slots``  `max_loras` of an engine without a GPU, which must leave one slot empty; else
                       None
        """
        self._models = models
        self._llm = llm
        self._cpu_slots = cpu_slots
        self._lock = asyncio.Lock()
        self._states: dict[str, AdapterState] = {}
        self._files: dict[tuple[str, str], bytes] = {}
        """Digest of `_files` at the last load, by name and path."""
        self._forgotten = ForgottenKeys()
        """Names and paths of adapters that were in `_files`."""
        self._forgotten_version = 0
        """Newest version of an unload that was in `_states`."""
        self._refused: dict[str, int] = {}
        """Version of the last change of each adapter that could not be applied."""
        for name, one in models.lora_requests.items():
            self._states[name] = AdapterState(0, one.lora_path, one.is_3d_lora_weight)
            self._files[name, one.lora_path] = _files(one.lora_path)

    def states(self) -> AdapterStates:
        """Return the last change of each adapter."""
        return {name: (one.version, one.path, one.is_3d) for name, one in self._states.items()}

    def _state(self, name: str) -> AdapterState:
        return self._states.get(name) or AdapterState(self._forgotten_version, None)

    def _set(self, name: str, state: AdapterState) -> None:
        """Set the last change of an adapter; forget the oldest unloads above UNLOADS_KEPT.

        Forgets none whose newer load has failed: `merge` tries that load again.
        """
        self._states.pop(name, None)
        self._states[name] = state
        final = [
            each for each, one in self._states.items() if one.path is None and self._refused.get(each, 0) <= one.version
        ]
        for each in final[:-UNLOADS_KEPT]:
            self._forgotten_version = max(self._forgotten_version, self._states.pop(each).version)
            self._refused.pop(each, None)

    def _set_files(self, name: str, path: str, files: bytes) -> None:
        """Set the files of a loaded adapter; forget those of the oldest load above FILES_KEPT."""
        self._files.pop((name, path), None)
        self._files[name, path] = files
        if len(self._files) > FILES_KEPT:
            oldest = next(iter(self._files))
            del self._files[oldest]
            self._forgotten.add(oldest)

    async def load(self, name: str, path: str, is_3d: bool, version: int) -> dict[str, Any] | None:
        """Load an adapter. Return None, or an error body in OpenAI's format.

        ``version``  version of the change (`AdapterState`)
        """
        async with self._lock:
            return await self._load(name, path, is_3d, version)

    async def unload(self, name: str, version: int) -> dict[str, Any] | None:
        """Unload an adapter for later requests. Return None, or an error body as `load` does.

        ``version``  version of the change (`AdapterState`)
        """
        async with self._lock:
            # The clock of the router that unloads may be behind that of the router that loaded.
            return await self._unload(name, max(version, self._state(name).version + 1))

    async def revert(self, name: str, version: int) -> None:
        """Unload the adapter if its last change is the load with `version`.

        The router calls it on all engines of a model when a load has failed and some of them may
        have loaded the adapter. An engine without the adapter records the revert. So it does not
        apply the load of a peer that has missed the revert, and that peer unloads the adapter.
        """
        async with self._lock:
            state = self._state(name)
            if state.path is None and state.version <= version:
                self._set(name, AdapterState(version + 1, None))
            elif state.path is not None and state.version == version:
                await self._unload(name, version + 1)

    async def merge(self, peers: Iterable[AdapterStates]) -> None:
        """Load and unload adapters where a peer's state has a higher version than this engine's.

        Logs the first error of each change; a later call tries the change again.
        """
        for states in peers:
            for name, (version, path, is_3d) in states.items():
                async with self._lock:
                    if version > self._state(name).version:
                        await self._take_or_log(name, AdapterState(version, path, is_3d))

    async def _take_or_log(self, name: str, change: AdapterState) -> None:
        """Apply one change of a peer. Log its first error only: each `merge` tries it again."""
        try:
            problem = await self._take(name, change)
        except Exception as error:  # the other adapters are independent of this one
            problem = repr(error)
        if problem is None:
            self._refused.pop(name, None)
        elif self._refused.get(name) != change.version:
            self._refused[name] = change.version
            logger.error(
                "cannot apply a peer's change of adapter %s; trying again at each synchronization: %s", name, problem
            )

    async def _take(self, name: str, change: AdapterState) -> str | None:
        """Apply one change of a peer. Return None, or why the adapter cannot be loaded.

        First unloads this engine's adapter `name`, even if the load then fails: a load follows an
        unload, so the previous weights must not be used.
        """
        if name in self._models.lora_requests:
            await self._unload(name, change.version)
        if change.path is None:
            self._set(name, change)
            return None
        # Newer than the changes before that unload. Older than this load: `merge` tries it again.
        self._set(name, AdapterState(change.version - 1, None))
        problem = await self._load(name, change.path, change.is_3d, change.version)
        if problem is not None:
            return str(problem["error"]["message"])
        logger.info("loaded adapter %s, which a peer engine has loaded", name)
        return None

    async def _load(self, name: str, path: str, is_3d: bool, version: int) -> dict[str, Any] | None:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        own = self._state(name)
        if own.version == version and own.path is not None:
            return None  # `merge` has loaded it from a peer's state meanwhile
        if own.path is None and own.version >= version:
            return _error(
                HTTPStatus.SERVICE_UNAVAILABLE, f"a newer request has unloaded '{name}'; retry later", "Conflict"
            )
        try:
            files = await asyncio.to_thread(_files, path)
        except OSError as error:
            return _error(
                HTTPStatus.BAD_REQUEST,
                f"'{path}' cannot be read: {error}; make it readable on the nodes of all engines",
                "InvalidUserInput",
            )
        if self._files.get((name, path), files) != files or (name, path) in self._forgotten:
            # vLLM's prefix cache identifies an adapter by name and path
            # (`_gen_lora_extra_hash_keys` in vllm/v1/core/kv_cache_utils.py).
            return _error(
                HTTPStatus.BAD_REQUEST,
                f"the files in '{path}' may have changed since '{name}' was loaded from there, and KV of the previous "
                "weights may be cached; load the new weights from another path, or under another name",
                "InvalidUserInput",
            )
        if name not in self._models.lora_requests and (problem := await self._no_slot()):
            return _error(HTTPStatus.BAD_REQUEST, problem, "InvalidUserInput")
        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path, is_3d_lora_weight=is_3d)
        reply = await self._models.load_lora_adapter(request)
        if not isinstance(reply, str):
            return reply.model_dump(mode="json")
        self._set(name, AdapterState(version, path, is_3d))
        self._set_files(name, path, files)
        return None

    async def _unload(self, name: str, version: int) -> dict[str, Any] | None:
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        reply = await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
        if not isinstance(reply, str):
            return reply.model_dump(mode="json")
        self._set(name, AdapterState(version, None))
        return None

    async def _no_slot(self) -> str | None:
        """Return why vLLM's CPU kernels cannot serve one more adapter, or None.

        First frees the slots of unloaded adapters that no request uses: vLLM keeps them occupied.
        Returns None at once for an engine with a GPU.
        """
        if self._cpu_slots is None:
            return None
        requests = self._llm.output_processor.request_states.values()
        used = {one.lora_int_id for one in self._models.lora_requests.values()}
        used |= {one.lora_request.lora_int_id for one in requests if one.lora_request is not None}
        for unused in set(await self._llm.list_loras()) - used:
            await self._llm.remove_lora(unused)
        from actors.upstream.cpu_build.vllm_cpu_kernels import adapter_problem

        problem = adapter_problem(self._cpu_slots, len(used) + 1)
        return None if problem is None else str(problem)


def _error(status: HTTPStatus, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": int(status)}}


def _files(path: str) -> bytes:
    """Return a digest of name, size and mtime of each file of an adapter, in 16 bytes.

    Empty if `path` is no adapter folder. vLLM reads no subfolders of an adapter. Raises OSError if
    the folder cannot be read.
    """
    folder = Path(path)
    if not (folder / "adapter_config.json").is_file():
        return b""
    with os.scandir(folder) as entries:
        stats = {entry.name: entry.stat() for entry in entries if entry.is_file()}
    states = [(name, stats[name].st_size, stats[name].st_mtime_ns) for name in sorted(stats)]
    return hashlib.blake2b(repr(states).encode(), digest_size=16).digest()
