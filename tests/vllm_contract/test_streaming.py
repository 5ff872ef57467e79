"""Layers sent during the step: reports of steps, and actions of workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from connectors.planning.layout import Group, GroupKind, LayerPages, MemoryKind
from connectors.vllm_hma.orders import Chunk, Orders
from connectors.vllm_hma.worker_side.steps import Begun, Ended, LayersComputed, StepFence, Steps
from tests.vllm_contract.workers import ARRIVED, EXPECT, NOTHING, SENT, Scripted, Worker, receive, results, until


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


def group(index: int, *layers: str) -> Group:
    parts = [LayerPages(layer, 4096, 64, 1, 1, 64, 1, 64, 64, part) for layer in layers for part in "kv"]
    return Group(index, GroupKind.FULL, 4, None, tuple(parts))


GROUPS = (group(0, "a", "c"), group(1, "b"))
FIRST, SECOND = Chunk("q", ((1,), (2,)), 4, True), Chunk("r", ((3,), (4,)), 4, True)


def test_layers_come_out_as_they_are_run() -> None:
    """The first layers of each group without a gap; a layer out of order waits for those before
    it.
    """
    steps = Steps(GROUPS, StepFence(torch.device("cpu")))
    steps.begin([FIRST])
    assert [steps.layer(name) for name in ("c", "b", "a", "unknown")] == [False, True, True, False]
    steps.end([FIRST, SECOND])
    assert list(steps.passed()) == [
        Begun((FIRST,)),
        LayersComputed(("q",), 1, 1),
        LayersComputed(("q",), 0, 2),
        Ended((FIRST, SECOND), frozenset({"q"})),
    ]
    assert not steps.layer("a"), "no step is in progress"


def test_nothing_comes_out_before_the_device_has_done_it() -> None:
    """Chunks of the next step wait, too: layers of this step must not complete them."""
    fence = SlowFence()
    steps = Steps(GROUPS, fence)
    steps.begin([FIRST])
    steps.layer("a")
    steps.end([FIRST])
    steps.begin([SECOND])
    assert list(steps.passed()) == [Begun((FIRST,))]
    fence.done.add(fence.marked[0])
    assert list(steps.passed()) == [LayersComputed(("q",), 0, 1)]
    fence.done.add(fence.marked[1])
    assert list(steps.passed()) == [Ended((FIRST,), frozenset({"q"})), Begun((SECOND,))]


def test_what_a_request_has_lost_is_dropped() -> None:
    """Chunks and layers of a request whose blocks were freed are not returned."""
    fence = SlowFence()
    steps = Steps(GROUPS, fence)
    steps.begin([FIRST, SECOND])
    steps.layer("b")
    steps.end([FIRST, SECOND])
    steps.drop("q")
    fence.done.update(fence.marked)
    assert list(steps.passed()) == [
        Begun((SECOND,)),
        LayersComputed(("r",), 1, 1),
        Ended((SECOND,), frozenset({"q", "r"})),
    ]


@pytest.mark.parametrize("streaming", ["layer", "auto"])
def test_a_layer_arrives_while_the_step_goes_on(worker: Callable[..., Worker], streaming: str) -> None:
    """With ``streaming: layer``, all of a one-layer last chunk is sent before the step has ended;
    Fin follows it. Earlier chunks overlap with the next chunk; only the step's end sends them.
    ``auto`` does so in host memory.
    """
    producer, consumer = worker("p", streaming=streaming, transport_class=Scripted), worker("c")
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    until(lambda: producer.runtime.counts()["live"] == 1 and consumer.runtime.counts()["offered"] == 1)
    for chunk in (Chunk("q", ((1,),), 4), Chunk("q", ((2,),), 7, True)):
        orders = Orders(chunks=[chunk])
        producer.runtime.before_forward(orders)
        producer.runtime.layer_computed("layer")
        if chunk.last:
            until(lambda: consumer.cache[[3, 5], 0].tolist() == [2, 3])
        else:
            assert not producer.runtime.counts()["writes"]
        assert consumer.runtime.results() == NOTHING
        producer.runtime.after_forward(orders)
        until(lambda: consumer.cache[3, 0] == 2)
    assert results(consumer) == ARRIVED


@pytest.mark.parametrize(("streaming", "memory"), [("chunk", "DRAM"), ("auto", "VRAM")])
def test_no_layer_leaves_before_the_step_has_ended(worker: Callable[..., Worker], streaming: str, memory: str) -> None:
    producer = worker("p", streaming=streaming, memory_kind=MemoryKind(memory, 0), transport_class=Scripted)
    consumer = worker("c", memory_kind=MemoryKind(memory, 0))
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    until(lambda: producer.runtime.counts()["live"] == 1 and consumer.runtime.counts()["offered"] == 1)
    orders = Orders(chunks=[Chunk("q", ((1, 2),), 7, True)])
    producer.runtime.before_forward(orders)
    producer.runtime.layer_computed("layer")
    producer.runtime.results()
    assert not producer.runtime.counts()["writes"]
    producer.runtime.after_forward(orders)
    producer.step(finished=[SENT])
    assert results(consumer) == ARRIVED
