"""LoRA adapters of one engine, loaded and unloaded at run time.

The router records an adapter, then loads it on all engines of its model. An engine that starts
later loads the recorded adapters, and each engine loads one that it lacks when a request names it.
For that, `resolve_lora` replaces vLLM's method of the same name, which asks its LoRA resolvers and
keeps a lock for each unknown name that a request has ever had
(vllm/entrypoints/openai/models/serving.py).
"""

import asyncio
import hashlib
import logging
import os
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.adapter_records import AdapterRecord, AdapterRecords
from actors.errors import UnavailableError

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
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
        self._lock = asyncio.Lock()
        self._files: dict[tuple[str, str], bytes] = {}
        """Digest of `_files` at the last load, by name and path."""
        self._resolved: set[str] = set()
        """Adapters loaded from their records. The router may not know this engine yet, so `compare`
        follows their records."""
        self._records: AdapterRecords | None = None
        self._model = ""
        for name, one in models.lora_requests.items():
            self._files[name, one.lora_path] = _files(one.lora_path)

    async def follow(self, records: AdapterRecords, model: str) -> None:
        """Load the recorded adapters of `model` now, and later ones when a request names them.

        Logs adapters that cannot be loaded. Raises UnavailableError if the records cannot be read.
        """
        self._records, self._model = records, model
        self._models.resolve_lora = self.resolve_lora
        for name in await records.names():
            await self.resolve_lora(name)

    async def resolve_lora(self, lora_name: str) -> "LoRARequest | ErrorResponse":
        """Return the loaded adapter, after loading it from its record if necessary; vLLM's hook."""
        from vllm.entrypoints.serve import create_error_response

        problem = f"LoRA adapter {lora_name} does not exist"
        try:
            record = await self._record_of(lora_name)
        except UnavailableError as error:
            logger.error("cannot read the record of an adapter: %s", error)
            record = None
        async with self._lock:
            if record is not None and lora_name not in self._models.lora_requests:
                refused = await self._load(lora_name, record.path, record.is_3d)
                if refused is None:
                    self._resolved.add(lora_name)
                else:
                    problem = refused["error"]["message"]
                    logger.error("cannot load the recorded adapter %s: %s", lora_name, problem)
            found = self._models.lora_requests.get(lora_name)
        if found is not None:
            return found
        return create_error_response(message=problem, err_type="NotFoundError", status_code=HTTPStatus.NOT_FOUND)

    async def compare(self) -> None:
        """Unload the adapters loaded from records that have been deleted or changed since.

        Raises UnavailableError if the records cannot be read.
        """
        for name in list(self._resolved):
            record = await self._record_of(name)
            own = self._models.lora_requests.get(name)
            if own is not None and (
                record is None or (record.path, record.is_3d) != (own.lora_path, own.is_3d_lora_weight)
            ):
                await self.unload(name)

    async def _record_of(self, name: str) -> AdapterRecord | None:
        assert self._records is not None, "`follow` sets it"
        record = await self._records.get(name)
        return record if record is not None and record.model == self._model else None

    async def load(self, name: str, path: str, is_3d: bool) -> dict[str, Any] | None:
        """Load an adapter. Return None, or an error body in OpenAI's format."""
        async with self._lock:
            own = self._models.lora_requests.get(name)
            if own is not None and name in self._resolved and (own.lora_path, own.is_3d_lora_weight) == (path, is_3d):
                self._resolved.discard(name)
                return None
            return await self._load(name, path, is_3d)

    async def unload(self, name: str) -> dict[str, Any] | None:
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        async with self._lock:
            self._resolved.discard(name)
            reply = await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
            return None if isinstance(reply, str) else reply.model_dump(mode="json")

    async def _load(self, name: str, path: str, is_3d: bool) -> dict[str, Any] | None:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        try:
            files = await self._checked(name, path)
        except ValueError as problem:
            return _error(HTTPStatus.BAD_REQUEST, str(problem), "InvalidUserInput")
        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path, is_3d_lora_weight=is_3d)
        reply = await self._models.load_lora_adapter(request)
        if not isinstance(reply, str):
            return reply.model_dump(mode="json")
        self._files[name, path] = files
        return None

    async def _checked(self, name: str, path: str) -> bytes:
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
        if name not in self._models.lora_requests and (problem := await self._no_slot()):
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
