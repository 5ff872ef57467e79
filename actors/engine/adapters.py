"""LoRA adapters of one engine, loaded and unloaded at run time.

The router records an adapter, then loads it on all engines of its model. An engine that starts
later loads the recorded adapters, and each engine loads one that it lacks when a request names it:
vLLM asks `RecordedAdapters`, one of its LoRA resolvers.
"""

import asyncio
import hashlib
import logging
import os
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.adapter_records import AdapterRecords
from actors.errors import UnavailableError

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.request import LoRARequest

    from actors.upstream.vllm_replaying_llm import ReplayingLLM

logger = logging.getLogger(__name__)

MOST_FILES = 100_000
"""Number of adapters, by name and path, that one engine can load in its life."""


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
        self._loading: set[str] = set()
        """Names that vLLM may be loading now; each needs a slot."""
        self._files: dict[tuple[str, str], bytes] = {}
        """Digest of `_files` at the last load, by name and path."""
        self._resolved: set[str] = set()
        """Adapters loaded from their records, for which the router's `load` may still come."""
        self._records: AdapterRecords | None = None
        self._model = ""
        for name, one in models.lora_requests.items():
            self._files[name, one.lora_path] = _files(one.lora_path)

    async def follow(self, records: AdapterRecords, model: str) -> None:
        """Load the recorded adapters of `model` now, and later ones when a request names them.

        Logs adapters that cannot be loaded. Raises UnavailableError if the records cannot be read.
        """
        from vllm.lora.request import LoRARequest

        self._records, self._model = records, model
        self._models.lora_resolvers.append(_resolver(self))
        for name in await records.names():
            record = await records.get(name)
            if record is None or record.model != model:
                continue
            found = await self._models.resolve_lora(name)
            if not isinstance(found, LoRARequest):
                logger.error("cannot load the recorded adapter %s: %s", name, found.error.message)

    async def load(self, name: str, path: str, is_3d: bool) -> dict[str, Any] | None:
        """Load an adapter. Return None, or an error body in OpenAI's format."""
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        own = self._models.lora_requests.get(name)
        if own is not None and name in self._resolved and (own.lora_path, own.is_3d_lora_weight) == (path, is_3d):
            return None
        try:
            files = await self._checked(name, path)
        except ValueError as problem:
            return _error(HTTPStatus.BAD_REQUEST, str(problem), "InvalidUserInput")
        try:
            request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path, is_3d_lora_weight=is_3d)
            reply = await self._models.load_lora_adapter(request)
        finally:
            self._loading.discard(name)
        if not isinstance(reply, str):
            return reply.model_dump(mode="json")
        self._files[name, path] = files
        return None

    async def unload(self, name: str) -> dict[str, Any] | None:
        """Unload an adapter for later requests. Return None, or an error body as `load` does."""
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        for names in (self._resolved, self._loading):
            names.discard(name)
        reply = await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
        return None if isinstance(reply, str) else reply.model_dump(mode="json")

    async def recorded(self, name: str) -> "LoRARequest | None":
        """Return the request with which vLLM loads the recorded adapter `name`; None without one.

        Also returns None, and logs the reason, if the record cannot be read or used.
        """
        from vllm.lora.request import LoRARequest

        assert self._records is not None, "`follow` sets it"
        try:
            record = await self._records.get(name)
            if record is None or record.model != self._model:
                return None
            self._files[name, record.path] = await self._checked(name, record.path)
            self._resolved.add(name)
        except (UnavailableError, ValueError) as problem:
            logger.error("cannot load the adapter %s: %s", name, problem)
            return None
        return LoRARequest(lora_name=name, lora_int_id=1, lora_path=record.path, is_3d_lora_weight=record.is_3d)

    async def _checked(self, name: str, path: str) -> bytes:
        """Return the digest of an adapter's files, and reserve a slot for it in `_loading`.

        Raises ValueError if the adapter cannot be loaded.
        """
        try:
            files = await asyncio.to_thread(_files, path)
        except OSError as error:
            raise ValueError(
                f"'{path}' cannot be read: {error}; make it readable on the nodes of all engines"
            ) from None
        if self._files.get((name, path), files) != files:
            # vLLM's prefix cache identifies an adapter by name and path
            # (`_gen_lora_extra_hash_keys` in vllm/v1/core/kv_cache_utils.py).
            raise ValueError(
                f"the files in '{path}' have changed since '{name}' was loaded from there, and KV of the previous "
                "weights may be cached; load the new weights from another path, or under another name"
            )
        if len(self._files) >= MOST_FILES and (name, path) not in self._files:
            raise ValueError(f"this engine has loaded {MOST_FILES} adapters; restart it to load others")
        self._loading.add(name)
        if name not in self._models.lora_requests and (problem := await self._no_slot()):
            self._loading.discard(name)
            raise ValueError(problem)
        return files

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

        problem = adapter_problem(self._cpu_slots, len(used) + len(self._loading - self._models.lora_requests.keys()))
        return None if problem is None else str(problem)


def _resolver(adapters: EngineAdapters) -> Any:
    """Return a LoRA resolver of vLLM for the recorded adapters."""
    from vllm.lora.resolver import LoRAResolver

    class RecordedAdapters(LoRAResolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> "LoRARequest | None":
            return await adapters.recorded(lora_name)

    return RecordedAdapters()


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
