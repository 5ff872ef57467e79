"""A producer and a consumer process on one fabric, for benchmarks of the layers below vLLM.

Both run NIXL agents as the connector's workers do. The consumer does what an idle worker's progress
thread does during a transfer: it polls for notifications, then pauses for ``rest_s``. The parent
sends the producer one command at a time, so several pairs (of different settings) can alternate on
one machine.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import xxhash

from connectors.planning.blocks import Ints
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region

HOST = MemoryKind("DRAM", 0)
ANSWER_S = 600.0
REST_S = 0.001


@dataclass(frozen=True)
class Fabric:
    """A fabric. ``environment`` has UCX's variables."""

    name: str
    environment: Mapping[str, str]


SHARED_MEMORY = Fabric("shared memory", {"UCX_NET_DEVICES": "lo"})
TCP_LOOPBACK = Fabric("TCP loopback", {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"})


class Side:
    """Cache of one end: ``layers`` layers of ``blocks`` pages of ``page_bytes``, registered with
    our transport.
    """

    def __init__(self, name: str, page_bytes: int, blocks: int, layers: int) -> None:
        from connectors.transport.nixl import NixlTransport

        self.memory = np.zeros((layers, blocks, page_bytes), np.uint8)
        pages = LayerPages("", 0, page_bytes, 1, 1, page_bytes, 1, page_bytes, page_bytes, "benchmark")
        every = tuple(
            replace(pages, layer=f"layers.{k}", address=layer.ctypes.data) for k, layer in enumerate(self.memory)
        )
        self.regions = tuple(Region(layer.ctypes.data, layer.nbytes, HOST) for layer in self.memory)
        self.layout = EngineLayout(0, 1, blocks, self.regions, (Group(0, GroupKind.FULL, 1, None, every),))
        self.transport = NixlTransport(name)
        self.transport.register(self.layout.regions)

    def digest(self, ids: Ints) -> str:
        """Return the content of the named blocks of all layers, in order."""
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.memory[:, ids]).data)


def enter(fabric: Fabric, environment: Mapping[str, str]) -> None:
    """Select the fabric for this process. Call before the import of NIXL."""
    os.environ.update(fabric.environment)
    os.environ.update(environment)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")


def consume(rest_s: float, pipe: Connection, fabric: Fabric, environment: Mapping[str, str]) -> None:
    """Consumer process: creates a cache of any requested shape, and runs its progress thread."""
    enter(fabric, environment)
    side: Side | None = None
    while True:
        if side is not None and not pipe.poll(rest_s):
            side.transport.notifications()
            continue
        word, *arguments = pipe.recv()
        if word == "stop":
            break
        if word == "shape":
            if side is not None:
                side.transport.close()
            side = Side(f"consumer-{os.getpid()}-{arguments[0]}", *arguments)
            pipe.send((side.transport.metadata(), side.layout))
        elif word == "digest":
            assert side is not None
            found = side.digest(arguments[0])
            # Before the answer: the producer may write here as soon as it has it.
            side.memory[:] = 0
            pipe.send(found)
    if side is not None:
        side.transport.close()


def produce(make: Callable[..., Any], pipe: Connection, fabric: Fabric, environment: Mapping[str, str]) -> None:
    """Producer process: ``shape`` creates its end and answers with ``end.shaped``; other
    commands are its methods.
    """
    enter(fabric, environment)
    end: Any = None
    while True:
        word, *arguments = pipe.recv()
        if word in ("stop", "shape") and end is not None:
            end.close()
            end = None
        if word == "stop":
            return
        if word == "shape":
            end = make(*arguments)
            pipe.send(end.shaped)
        else:
            pipe.send(getattr(end, word)(*arguments))


class Pair:
    """Start two processes.

    ``producer`` takes ``(pipe, fabric, environment)``, can be pickled and answers commands. So does
    ``consumer``, unless it is ``consume`` with a pause of ``rest_s``.
    """

    def __init__(
        self,
        fabric: Fabric,
        producer: Any,
        environment: Mapping[str, str] | None = None,
        rest_s: float = REST_S,
        consumer: Any = None,
    ) -> None:
        settings = dict(environment or {})
        context = multiprocessing.get_context("spawn")
        self._producer, theirs = context.Pipe()
        self._consumer, others = context.Pipe()
        self._processes = [
            context.Process(target=producer, args=(theirs, fabric, settings)),
            context.Process(target=consumer or functools.partial(consume, rest_s), args=(others, fabric, settings)),
        ]
        for process in self._processes:
            process.start()

    def ask(self, *command: Any) -> Any:
        """Return the producer's answer to a command."""
        return _answer(self._producer, self._processes[0], command)

    def tell(self, *command: Any) -> None:
        """Send the producer a command; ``hear`` reads its answer later."""
        self._producer.send(command)

    def hear(self) -> Any:
        """Return the producer's answer to the last command."""
        return _hear(self._producer, self._processes[0], "an answer")

    def ask_consumer(self, *command: Any) -> Any:
        return _answer(self._consumer, self._processes[1], command)

    def close(self) -> None:
        for pipe in (self._producer, self._consumer):
            with contextlib.suppress(OSError):
                pipe.send(("stop",))
        for process in self._processes:
            process.join(20)
            process.kill()


def _answer(pipe: Connection, process: Any, command: tuple[Any, ...]) -> Any:
    pipe.send(command)
    return _hear(pipe, process, command[0])


def _hear(pipe: Connection, process: Any, what: str) -> Any:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"{what} took longer than {ANSWER_S:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"a process of the pair ended during {what!r}") from None
