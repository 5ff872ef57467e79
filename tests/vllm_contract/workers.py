"""Workers without engines: a real WorkerRuntime and side channel over a numpy cache in memory."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from connectors.codec import encode_agent_metadata
from connectors.planning.descriptors import Runs
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.protocol.agent_metadata import AgentMetadata, ModelIdentity
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress, prompt_digest
from connectors.vllm_hma.config import ConnectorConfig
from connectors.vllm_hma.handshake.processes import own_process
from connectors.vllm_hma.handshake.secret import derive_keys
from connectors.vllm_hma.handshake.side_channel import MetadataServer
from connectors.vllm_hma.orders import Chunk, Expect, Finished, Orders, Receive
from connectors.vllm_hma.worker_side import runtime
from connectors.vllm_hma.worker_side.runtime import WorkerRuntime
from connectors.vllm_hma.worker_side.steps import StepFence
from testing.memory_transport import Fabric, MemoryTransport

BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 8, 4, 64
IDENTITY = ModelIdentity("model", "float32", "auto", "0.32.0")
LIMITS = TransferLimits(handshake_s=60.0, progress_s=60.0, alive_s=0.2, cancel_s=60.0, lease_s=60.0)
"""Deadlines far above a pause of the machine, for tests in which none expires."""

SHORT = TransferLimits(handshake_s=3.0, progress_s=1.0, alive_s=0.2, cancel_s=0.3, lease_s=2.0)
"""Short deadlines, for tests in which one expires."""
DIGEST = prompt_digest([1, 2, 3])

NOTHING: tuple[set[str], set[str], set[str]] = (set(), set(), set())
ARRIVED: tuple[set[str], set[str], set[str]] = (set(), {"r"}, set())
FAILED: tuple[set[str], set[str], set[str]] = (set(), {"r"}, {"r"})
"""``results`` of decode: nothing yet, request r's KV has arrived, or its transfer has failed."""

EXPECT, SENT = Expect("q", "t", 7, DIGEST), Finished("q", True, "")
WHOLE = Chunk("q", ((1, 2),), 7)
"""Prefill's request for ``receive``, its end, and its prompt in one chunk: blocks 1 and 2."""


def layout_of(address: int, packing: str = "p", memory_kind: MemoryKind = MemoryKind("DRAM", 0)) -> EngineLayout:  # noqa: B008
    """Return a cache at ``address``: one full-attention group of one layer."""
    pages = LayerPages("layer", address, BLOCK_BYTES, 1, 1, BLOCK_BYTES, 1, BLOCK_BYTES, BLOCK_BYTES, packing)
    region = Region(address, BLOCKS * BLOCK_BYTES, memory_kind)
    return EngineLayout(0, 1, BLOCKS, (region,), (Group(0, GroupKind.FULL, BLOCK_TOKENS, None, (pages,)),))


class Scripted(MemoryTransport):
    """A transport whose writes a test delays, breaks or damages.

    ``held``    whether writes in flight do not end, as over a slow network
    ``late``    whether a write reads its source when it ends, as RDMA may; else at the post
    ``errors``  error of a call by its name, ``write`` or ``poll``, and its number
    ``slow``    number of the post that lasts until ``gate`` opens; ``overdue``: it did not open
    """

    held = late = damages = False

    def __init__(self, name: str, fabric: Fabric) -> None:
        super().__init__(name, fabric)
        self.errors: dict[tuple[str, int], Callable[[], Exception]] = {}
        self.slow, self.posts, self.polls, self.overdue = -1, 0, 0, False
        self.posting, self.gate = threading.Event(), threading.Event()
        self._reads_later: dict[int, tuple[str, Runs, MemoryKind, MemoryKind]] = {}

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        number, self.posts = self.posts, self.posts + 1
        if number == self.slow:
            self.posting.set()
            self.overdue |= not self.gate.wait(10.0)
        if ("write", number) in self.errors:
            raise self.errors["write", number]()
        if self.late:
            self._reads_later[-number] = peer, runs, source, target
            return -number
        handle = super().write(peer, runs, source, target)
        if self.damages:  # one bit of the last byte
            ctypes.c_uint8.from_address(int(runs.dst[-1] + runs.length[-1]) - 1).value ^= 1
        return handle

    def poll(self, handle: int) -> bool:
        if self.held:
            return False
        number, self.polls = self.polls, self.polls + 1
        if ("poll", number) in self.errors:
            self._pending.pop(handle, None)
            raise self.errors["poll", number]()
        return super().poll(super().write(*self._reads_later.pop(handle)) if self.late else handle)


class HeldWrites(Scripted):
    """Writes complete only after ``let_go``, as over a slow network."""

    held = True


class SlowFence(StepFence):
    """A device that completes only the work that a test names."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.done: set[object] = set()
        self.marked: list[object] = []

    def mark(self) -> torch.Event | None:
        self.marked.append(object())
        return self.marked[-1]

    def passed(self, event: torch.Event | None) -> bool:  # type: ignore[override]
        return event is None or event in self.done


class Clock:
    """Clock of the test's thread; the progress thread uses the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rests: list[float] = []
        self.during: Callable[[], None] = lambda: None
        self._ours, self._real, self._added = threading.get_ident(), runtime.time, 0.0
        monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=self._monotonic, sleep=self._sleep))

    def _monotonic(self) -> float:
        added = self._added if threading.get_ident() == self._ours else 0.0
        return self._real.monotonic() + added

    def _sleep(self, seconds: float) -> None:
        """Pause of the fence: takes no time, and counts as a tenth of a second."""
        assert threading.get_ident() == self._ours
        self.rests.append(seconds)
        self._added += max(seconds, 0.1)
        self.during()


def scripted(worker: Worker) -> Scripted:
    assert isinstance(worker.transport, Scripted)
    return worker.transport


class Worker:
    """A WorkerRuntime over a numpy cache of one full-attention group, and its side channel."""

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        identity: ModelIdentity = IDENTITY,
        packing: str = "p",
        transport_class: type[MemoryTransport] = MemoryTransport,
        integrity: str = "auto",
        streaming: str = "chunk",
        memory_kind: MemoryKind = MemoryKind("DRAM", 0),  # noqa: B008
        secret: str = "",
        limits: TransferLimits = LIMITS,
        fence: StepFence | None = None,
        zeroes_blocks: bool = False,
        late_orders: bool | None = None,
    ) -> None:
        self.integrity = integrity
        self.cache = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        if issubclass(transport_class, Scripted):  # a producer's content: block 1 has 2, and so on
            self.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
        layout = layout_of(self.cache.ctypes.data, packing, memory_kind)
        self.transport = transport = transport_class(f"{name}/0", fabric)
        transport.register(
            [dataclasses.replace(region, memory_kind=MemoryKind("DRAM", 0)) for region in layout.regions]
        )
        self.agent_metadata = AgentMetadata(name, identity, layout, transport.kind, transport.metadata(), own_process())
        self.runtime = WorkerRuntime(
            # Some limits are below those that a configuration may have.
            ConnectorConfig(integrity=integrity, streaming=streaming, secret=secret).model_copy(update=asdict(limits)),
            self.agent_metadata,
            transport,
            fence or StepFence(torch.device("cpu")),
            [torch.from_numpy(self.cache)],
            zeroes_blocks,
            memory_kind.memory != "DRAM" if late_orders is None else late_orders,
        )
        self.server = MetadataServer(
            "127.0.0.1", 0, [encode_agent_metadata(self.agent_metadata)], derive_keys(secret).identity
        )

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.agent_metadata.incarnation, "127.0.0.1", self.server.port)

    def step(self, **orders: Any) -> None:
        self.runtime.before_forward(Orders(**orders))
        self.runtime.after_forward(Orders(**orders))

    def close(self) -> None:
        self.server.close()
        self.runtime.close()


def receive(producer: EngineAddress, request: str = "r", transfer: str = "t") -> Receive:
    """Return an order for two blocks, tokens 0 to 6 of a prompt of 7."""
    return Receive(request, transfer, producer, DIGEST, ((3, 5),), 0, 6)


def compute(producer: Worker, name: str = "") -> None:
    """Compute the prompt of transfer ``t{name}`` in one chunk: blocks 1 and 2."""
    producer.step(expects=[Expect(f"q{name}", f"t{name}", 7, DIGEST)])
    producer.step(chunks=[Chunk(f"q{name}", ((1, 2),), 7)])


def transfer(producer: Worker, consumer: Worker, name: str = "") -> tuple[set[str], set[str], set[str]]:
    """Run a whole transfer of request ``r{name}``; return the consumer's results."""
    consumer.step(receives=[receive(producer.address, f"r{name}", f"t{name}")])
    compute(producer, name)
    producer.step(finished=[Finished(f"q{name}", True, "")])
    found = results(consumer)
    assert results(producer) == ({f"q{name}"}, set(), set())
    return found


def live(producer: Worker, consumer: Worker) -> None:
    """Send the consumer's offer and start prefill's request; wait until each knows of the other."""
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    until(lambda: producer.runtime.counts()["live"] == consumer.runtime.counts()["offered"] == 1)


def both_ends(worker: Callable[..., Worker], **producers: object) -> tuple[Worker, Worker]:
    """A producer whose only write is in flight, with the whole prompt computed, and its
    consumer.
    """
    producer, consumer = worker("p", transport_class=HeldWrites, **producers), worker("c")
    consumer.step(receives=[receive(producer.address)])
    compute(producer)
    until(lambda: posted(producer))
    return producer, consumer


def let_go(producer: Worker) -> None:
    scripted(producer).held = False


def sends_nothing_of_a_spoiled_step(
    producer: Worker, consumer: Worker, step: Callable[[Orders, bool], None], later: bool = False
) -> None:
    """Check that prefill's last chunk is not sent, if its step is spoiled or, ``later``, the next.

    ``step``  runs a step with these orders, which is spoiled or not
    """
    producer.cache[:] = 0xEE
    step(Orders(expects=[EXPECT], starts=["q"]), False)
    consumer.step(receives=[receive(producer.address)])
    until(lambda: producer.runtime.counts()["live"] == 1)
    chunks = [Chunk("q", ((1, 2),), 7, last=True)]
    step(Orders(chunks=[] if later else chunks), True)
    if later:
        step(Orders(chunks=chunks), False)
    step(Orders(finished=[SENT]), False)
    assert results(consumer) == FAILED
    assert results(producer) == ({"q"}, set(), set())
    assert (consumer.cache == 0).all(), "nothing of the step was written"


def posted(producer: Worker) -> bool:
    writes = producer.runtime._writes._open.values()  # noqa: SLF001
    return bool(writes) and not any(one.posting for one in list(writes))


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for another thread's work, at most ``within_s``."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {within_s} s"
        time.sleep(0.005)


def taken(worker: Worker) -> tuple[set[str], set[str], set[str]]:
    """Return the ids of requests that were sent, received and failed since the last call."""
    found = worker.runtime.results()
    return found.finished_sending, found.finished_recving, found.failed_recving


def results(worker: Worker, within_s: float = 60.0) -> tuple[set[str], set[str], set[str]]:
    """Step until the worker reports a result."""
    reported: list[tuple[set[str], set[str], set[str]]] = []

    def something() -> bool:
        reported.append(taken(worker))
        return any(reported[-1])

    until(something, within_s)
    return reported[-1]
