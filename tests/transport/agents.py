"""Agents of either transport over numpy buffers, and waits with a deadline."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind, Region
from connectors.transport.base import Transport
from connectors.transport.nixl import NixlTransport
from testing.memory_transport import Fabric, MemoryTransport

HOST = MemoryKind("DRAM", 0)
DEADLINE_S = 30.0
_numbers = itertools.count()


@dataclass
class Agent:
    """A transport with one registered buffer."""

    transport: Transport
    buffer: np.ndarray

    @property
    def name(self) -> str:
        return self.transport.name

    @property
    def address(self) -> int:
        return self.buffer.ctypes.data

    @property
    def end(self) -> int:
        return self.address + self.buffer.nbytes


def make_agent(kind: str, fabric: Fabric, size: int = 1 << 20, fill: int = 0) -> Agent:
    name = f"agent-{next(_numbers)}"
    transport: Transport = NixlTransport(name, devices=("lo",)) if kind == "nixl" else MemoryTransport(name, fabric)
    agent = Agent(transport, np.full(size, fill, np.uint8))
    transport.register([Region(agent.address, size, HOST)])
    return agent


def runs(*rows: tuple[int, int, int]) -> Runs:
    """(source, destination, bytes) rows."""
    return Runs(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


def until(done: Callable[[], bool], agents: Sequence[Agent] = ()) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, f"not done within {DEADLINE_S} s"
        for agent in agents:
            assert agent.transport.notifications() == []


def write(sender: Agent, receiver: Agent, what: Runs) -> None:
    handle = sender.transport.write(receiver.name, what, HOST, HOST)
    until(lambda: sender.transport.poll(handle), [receiver])


def receive(receiver: Agent, count: int, sender: Agent) -> list[tuple[str, bytes]]:
    messages: list[tuple[str, bytes]] = []

    def arrived() -> bool:
        messages.extend(receiver.transport.notifications())
        return len(messages) >= count

    until(arrived, [sender])
    return messages
