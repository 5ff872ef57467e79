"""Streams and events of a simulated device, which finds accesses that nothing orders.

Operations run at once, on CPU tensors. Each stream has a vector clock; an access of memory is a
race if a conflicting access of another stream, or of the host, does not precede it by events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[object, int]


class RaceError(AssertionError):
    """Two accesses of the same bytes are not ordered."""


def merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(count, clock.get(stream, 0))


class SimulatedDevice(TorchDispatchMode):
    """Module of a device, in the place of ``torch.cuda``, and observer of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.host: Clock = {}
        self._streams: list[SimulatedStream] = []
        self.compute = SimulatedStream(self)
        self._current = self.compute
        # (first address, last address, whether it is a write, stream, its count) of each access.
        self.accesses: list[tuple[int, int, bool, object, int]] = []
        self.late = False
        self.waits = True

    def Stream(self) -> SimulatedStream:
        return SimulatedStream(self)

    def Event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def current_stream(self) -> SimulatedStream:
        return self._current

    def synchronize(self) -> None:
        for stream in self._streams:
            merge(self.host, stream.clock)

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def access(self, ranges: Sequence[tuple[int, int]], write: bool, stream: Any = None) -> None:
        """Record an access of the current stream, or of the host."""
        clock = self.host if stream == "host" else self._current.clock
        who: object = "host" if stream == "host" else self._current
        if who != "host":
            merge(clock, self.host)
        clock[who] = clock.get(who, 0) + 1
        for first, last in ranges:
            for begin, end, wrote, other, count in self.accesses:
                if begin < last and first < end and (write or wrote) and other != who and clock.get(other, 0) < count:
                    raise RaceError(f"{who} and {other} access the same bytes, and nothing orders them")
        self.accesses += [(first, last, write, who, clock[who]) for first, last in ranges]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("aten.index_select"):
            self.access(rows(args[0], args[2]), False)
            self.access([dense(kwargs["out"])], True)
        elif name.startswith("aten.index_copy_"):
            self.access([dense(args[3])], False)
            self.access(rows(args[0], args[2]), True)
        elif name.startswith("aten.copy_"):
            self.access([dense(args[1])], False)
            self.access([dense(args[0])], True)
        return func(*args, **kwargs)


class SimulatedStream:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.clock: Clock = {}
        device._streams.append(self)  # noqa: SLF001 - the device made this stream

    def wait_event(self, event: SimulatedEvent) -> None:
        if self.device.waits:
            merge(self.clock, event.clock)


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.clock: Clock = {}

    def record(self, stream: SimulatedStream) -> None:
        merge(stream.clock, self._device.host)
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        if not self._device.late:
            merge(self._device.host, self.clock)
        return not self._device.late


def dense(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def rows(tensor: torch.Tensor, index: torch.Tensor) -> list[tuple[int, int]]:
    size, step = tensor.element_size(), tensor.stride(0)
    starts = [tensor.data_ptr() + at * step * size for at in index.tolist()]
    return [(start, start + tensor.shape[1] * size) for start in starts]
