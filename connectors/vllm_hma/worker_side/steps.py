"""Queue of the chunks and layers of engine steps that the device may not have computed yet.

Only the engine's thread appends. It queues kernels before an accelerator runs them, so each entry
except the start of a step has a ``StepFence`` event and is yielded after the event has passed.
Layers are appended without a lock: a forward pass must not wait for the progress thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from connectors.planning.layout import Group

if TYPE_CHECKING:
    # `make gpu-check` uses this module without vLLM.
    from connectors.vllm_hma.orders import Chunk, Receive


class StepFence:
    """Device events after which KV can be read. A CPU needs none: its kernels run synchronously."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def mark(self) -> torch.Event | None:
        """Return an event after the kernels queued so far by this thread; None on a CPU."""
        if self._device.type == "cpu":
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    @staticmethod
    def passed(event: torch.Event | None) -> bool:
        return event is None or event.query()


@dataclass(frozen=True, slots=True)
class Begun:
    """Start of a step that computes these last chunks of prompts and reports each layer."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """The step has computed the first ``stop`` layers of a group for these requests."""

    request_ids: tuple[str, ...]
    group: int
    stop: int


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a step that has computed these chunks. ``begun``: request ids of the step's Begun."""

    chunks: tuple[Chunk, ...]
    begun: frozenset[str]


@dataclass(frozen=True, slots=True)
class Zeroed:
    """The step has zeroed blocks of these decode requests: KV may now be written to them."""

    receives: tuple[Receive, ...]


Entry = Begun | LayersComputed | Ended | Zeroed


class Steps:
    """Entries of steps that ``passed`` has not yielded yet."""

    def __init__(self, groups: Sequence[Group], fence: StepFence) -> None:
        self._fence = fence
        self._positions: dict[str, tuple[int, int]] = {}
        for group in groups:
            names = dict.fromkeys(pages.layer for pages in group.layers)
            self._positions |= {name: (group.index, number) for number, name in enumerate(names)}
        self._entries: deque[tuple[torch.Event | None, Entry]] = deque()
        self._begun: tuple[str, ...] = ()
        self._run: dict[int, set[int]] = {}
        self._stop: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Begin a step with these last chunks; without chunks it does not report its layers."""
        self._begun = tuple(chunk.request_id for chunk in chunks)
        self._run, self._stop = {}, {}
        if chunks:
            self._entries.append((None, Begun(tuple(chunks))))

    def layer(self, name: str) -> bool:
        """Record a layer; return whether it extends its group's computed layers without a gap."""
        position = self._positions.get(name)
        if not self._begun or position is None:
            return False
        group, number = position
        run, before = self._run.setdefault(group, set()), self._stop.get(group, 0)
        run.add(number)
        stop = before
        while stop in run:
            stop += 1
        if stop == before:
            return False
        self._stop[group] = stop
        self._entries.append((self._fence.mark(), LayersComputed(self._begun, group, stop)))
        return True

    def end(self, chunks: Sequence[Chunk]) -> None:
        if chunks:
            self._entries.append((self._fence.mark(), Ended(tuple(chunks), frozenset(self._begun))))
        self._begun = ()

    def zero(self, receives: Sequence[Receive], event: torch.Event | None = None) -> None:
        """Append a Zeroed that passes after ``event``; None: after the kernels queued so far."""
        if receives:
            self._entries.append((event or self._fence.mark(), Zeroed(tuple(receives))))

    def take(self, ended: Callable[[Receive], bool]) -> list[Receive]:
        taken: list[Receive] = []
        for position, (event, entry) in enumerate(self._entries):
            if isinstance(entry, Zeroed):
                found = [each for each in entry.receives if ended(each)]
                left = tuple(each for each in entry.receives if each not in found)
                self._entries[position] = event, replace(entry, receives=left)
                taken += found
        return taken

    def drop(self, request_id: str) -> None:
        """Remove a prefill request whose blocks are freed or whose KV is wrong."""
        kept: deque[tuple[torch.Event | None, Entry]] = deque()
        for event, entry in self._entries:
            match entry:
                case Begun(chunks) | Ended(chunks):
                    left = tuple(chunk for chunk in chunks if chunk.request_id != request_id)
                    kept.append((event, replace(entry, chunks=left)))
                case LayersComputed(request_ids):
                    kept.append((event, replace(entry, request_ids=tuple(i for i in request_ids if i != request_id))))
                case Zeroed():
                    kept.append((event, entry))
        self._entries = kept

    def passed(self) -> Iterator[Entry]:
        """Remove and yield entries in order, up to the first that the device has not completed."""
        while self._entries and self._fence.passed(self._entries[0][0]):
            yield self._entries.popleft()[1]
