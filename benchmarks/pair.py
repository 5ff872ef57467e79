"""A producer and a consumer process over one fabric, for benchmarks of what lies below vLLM.

Both run NIXL agents as the connector's workers do. The consumer does what an idle worker's pump does while a transfer
is open: it asks for notifications, then rests ``rest_s``. The parent drives the producer with commands, one at a time,
so several pairs (of different settings) can take turns on one machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import xxhash

from connectors.planning.blocks import Ints
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, Place, Region

HOST = Place("DRAM", 0)
ANSWER_S = 600.0
REST_S = 0.001
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_REC, MS_SLAVE = 1 << 14, 1 << 19


@dataclass(frozen=True)
class Fabric:
    """``environment`` is UCX's; ``devices`` and ``namespaces`` are the producer's and the consumer's."""

    name: str
    environment: Mapping[str, str]
    namespaces: tuple[str, str] | None = None
    devices: tuple[str, str] | None = None


SHARED_MEMORY = Fabric("shared memory", {})
TCP_LOOPBACK = Fabric("TCP loopback", {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"})


@contextlib.contextmanager
def two_namespaces() -> Iterator[Fabric]:
    """TCP between two network namespaces joined by a veth pair. Needs root."""
    tag = os.getpid() % 100000
    spaces = (f"tandem-p{tag}", f"tandem-d{tag}")
    links = (f"tp{tag}", f"td{tag}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (space, link) in enumerate(zip(spaces, links, strict=True), 1):
            ip("link", "set", link, "netns", space)
            ip("-n", space, "addr", "add", f"10.231.77.{number}/24", "dev", link)
            ip("-n", space, "link", "set", link, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield Fabric("TCP, two namespaces", {"UCX_TLS": "tcp,self"}, spaces, links)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)


class Side:
    """The cache of one end: ``layers`` layers of ``blocks`` pages of ``page_bytes``, registered with our transport."""

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
        """Of the named blocks of all layers, in order."""
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.memory[:, ids]))


def enter(fabric: Fabric, end: int, environment: Mapping[str, str]) -> None:
    """Make this process one end of the fabric. Before NIXL is imported."""
    os.environ.update(fabric.environment)
    if fabric.devices is not None:
        os.environ["UCX_NET_DEVICES"] = fabric.devices[end]
    os.environ.update(environment)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if fabric.namespaces is not None:
        _enter_namespace(fabric.namespaces[end])


def _enter_namespace(name: str) -> None:
    """As ``ip netns exec`` does: the namespace, and a /sys of its own, where UCX looks for network devices."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result:
            raise OSError(ctypes.get_errno(), f"cannot {what}")

    with open(f"/var/run/netns/{name}") as space:
        check(libc.setns(space.fileno(), CLONE_NEWNET), f"enter {name}")
    check(libc.unshare(CLONE_NEWNS), "leave the mount namespace")
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None), "keep mounts apart")
    check(libc.mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None), "mount /sys")


def consume(rest_s: float, pipe: Connection, fabric: Fabric, environment: Mapping[str, str]) -> None:
    """The consumer process: a cache of whatever shape is asked for, and its pump."""
    enter(fabric, 1, environment)
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
            # Before the answer: what comes after it may write here already.
            side.memory[:] = 0
            pipe.send(found)
    if side is not None:
        side.transport.close()


class Pair:
    """Two processes. ``producer`` is a module-level function ``(pipe, fabric, environment)`` that answers commands.

    So is ``consumer``, if it is not ``consume`` with a rest of ``rest_s``.
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
        """The producer's answer to a command."""
        return _answer(self._producer, self._processes[0], command)

    def tell(self, *command: Any) -> None:
        """Give the producer a command whose answer is heard later."""
        self._producer.send(command)

    def hear(self) -> Any:
        """The producer's answer to what it was told."""
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
