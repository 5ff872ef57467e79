"""Identify the content of LoRA adapters in this process's memory, as vLLM read it from files: a
file may have changed since (docs/decisions/0031).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from connectors.vllm_hma.model.weights import digest_file
from connectors.vllm_hma.upstream.vllm_adapter_loads import watch_adapter_loads

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

ADAPTERS_KEPT = 100_000

_FOLDERS_KEPT = 1024

_SETTINGS = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""File names of weights in vLLM's order: vLLM reads the first one that exists."""

_State = tuple[tuple[str, int, int, int, int, int], ...]
"""Name, device, inode, size, and modification and status change time (ns) of each file."""

UNKNOWN = ""
"""Identity of an adapter of unknown content, or of a path that may have KV of several contents in
vLLM's prefix cache or in requests in progress."""


class Adapter(NamedTuple):
    """vLLM's id of a LoRA adapter, which selects its weights, and its path in requests. vLLM's
    prefix cache identifies an adapter by name and path.
    """

    number: int
    path: str


def adapter_of(request: LoRARequest | None) -> Adapter | None:
    return None if request is None else Adapter(request.lora_int_id, request.lora_path)


class AdapterLoads:
    """Identities of the adapters that this process has loaded. Not thread-safe.

    An identity other than UNKNOWN is equal on two engines only if they have loaded the same
    content. Until the engine ends, it is UNKNOWN for

    - a path that has had two contents,
    - a path whose weights vLLM has replaced by those of another path with the same id: requests
      with the first path then use the other weights, and vLLM's prefix cache may have KV of both,
    - files that changed, or that this process could not read, while vLLM read them,
    - an adapter after the first ADAPTERS_KEPT.
    """

    def __init__(self) -> None:
        # How often a load has added or changed identities.
        self.loads = 0
        self._identities: dict[Adapter, str] = {}
        self._read: dict[Path, tuple[_State, str]] = {}

    @property
    def identities(self) -> Mapping[Adapter, str]:
        return self._identities

    def identity(self, adapter: Adapter) -> str:
        return self._identities.get(adapter, UNKNOWN)

    @contextlib.contextmanager
    def reading(self, request: LoRARequest, folder: Path) -> Iterator[None]:
        """Record the adapter that vLLM reads from ``folder`` within this context, unless it raises.

        There is no deadline: like vLLM, this waits for a file system that does not answer.
        """
        before, digest = self._digest(folder)
        yield
        after = _state(folder)
        content = digest if before is not None and before == after else UNKNOWN
        self._record(Adapter(request.lora_int_id, request.lora_path), content)

    def _digest(self, folder: Path) -> tuple[_State | None, str]:
        state = _state(folder)
        if state is None:
            return None, UNKNOWN
        known = self._read.get(folder)
        if known is None or known[0] != state:
            # vLLM reads an adapter with ``load_inplace`` in each step that uses it. Without this
            # record, each such step would hash its files.
            try:
                known = self._read[folder] = (state, _digest(folder, state))
            except OSError:
                return None, UNKNOWN
        if len(self._read) > _FOLDERS_KEPT:
            del self._read[next(iter(self._read))]
        return known

    def _record(self, adapter: Adapter, content: str) -> None:
        if self.identity(adapter) == content != UNKNOWN:
            return
        self.loads += 1
        before = dict(self._identities)
        if adapter in before or len(before) < ADAPTERS_KEPT:
            self._identities[adapter] = content
        else:
            logger.warning("Tandem: more than %d adapters were loaded: %s shares no KV", ADAPTERS_KEPT, adapter.path)
            content = UNKNOWN
        mixed = {each.path for each in before if each.number == adapter.number} - {adapter.path}
        if {content, *(identity for each, identity in before.items() if each.path == adapter.path)} != {content}:
            mixed.add(adapter.path)
        if mixed or content == UNKNOWN:
            self._make_unknown(mixed, before)

    def _make_unknown(self, paths: AbstractSet[str], before: Mapping[Adapter, str]) -> None:
        for each in self._identities:
            if each.path in paths:
                self._identities[each] = UNKNOWN
        for each, identity in self._identities.items():
            if identity == UNKNOWN != before.get(each):
                logger.warning(
                    "Tandem: the content of LoRA adapter %s in memory or in cached KV is unclear: its files changed or "
                    "cannot be read, or weights of another path replaced it. Until it ends, this engine shares no KV "
                    "of %s. Load changed weights from a new path",
                    each.number,
                    each.path,
                )


class AdapterChanges:
    def __init__(self, loads: AdapterLoads) -> None:
        self._loads = loads
        self._taken: dict[Adapter, str] = {}
        self._taken_at = 0

    def take(self) -> dict[Adapter, str]:
        """Return the changes since the last call."""
        if self._taken_at == self._loads.loads:  # each step calls
            return {}
        self._taken_at, loaded = self._loads.loads, self._loads.identities
        changed = {each: identity for each, identity in loaded.items() if self._taken.get(each) != identity}
        self._taken |= changed
        return changed


_LOADS = AdapterLoads()


def adapter_loads() -> AdapterLoads:
    """The record begins with the first call: call it before vLLM's worker loads an adapter."""
    watch_adapter_loads(_LOADS.reading)
    return _LOADS


def _state(folder: Path) -> _State | None:
    states = []
    try:
        weights = next((name for name in _WEIGHTS if (folder / name).is_file()), _WEIGHTS[0])
        for name in (_SETTINGS, weights):
            stat = (folder / name).stat()
            states.append((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    except OSError:
        return None
    return tuple(states)


def _digest(folder: Path, state: _State) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for name, *_ in state:
        whole.update(f"{name}:{digest_file(folder / name)};".encode())
    return whole.hexdigest()
