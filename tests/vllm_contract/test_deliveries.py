"""Writes, layers, messages and digests of one delivery: a failure costs this delivery only."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.errors import ConfigurationError, FailedWriteError, TransportError
from connectors.planning.layout import Group, GroupKind, LayerPages, MemoryKind
from connectors.protocol.engines import Suspect
from connectors.protocol.wire import Message, Offer, Peer
from connectors.transport.digest import TransferDigest
from connectors.vllm_hma.handshake.message_sender import MessageSender
from connectors.vllm_hma.handshake.processes import own_process
from connectors.vllm_hma.orders import Chunk, Finished, Orders
from connectors.vllm_hma.reports import Kept, WorkerReport
from connectors.vllm_hma.worker_side import accelerator, runtime, writes
from connectors.vllm_hma.worker_side.progress_thread import ProgressThread
from connectors.vllm_hma.worker_side.steps import Begun, Ended, LayersComputed, StepFence, Steps
from connectors.vllm_hma.worker_side.trace import Trace
from testing.connector_state import snapshot
from testing.trace import read_trace
from tests.vllm_contract.workers import (
    ARRIVED,
    BLOCK_BYTES,
    EXPECT,
    FAILED,
    NOTHING,
    SENT,
    WHOLE,
    HeldWrites,
    Scripted,
    SlowFence,
    Worker,
    both_ends,
    compute,
    let_go,
    live,
    posted,
    receive,
    results,
    scripted,
    taken,
    transfer,
    until,
)

Make = Callable[..., Worker]
VRAM = MemoryKind("VRAM", 0)

# ---- slices of a write -------------------------------------------------------------------------


@pytest.fixture
def pair(worker: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[Worker, Worker, Scripted]:
    """A producer that posts one block a slice, a consumer that has sent its offer, and the
    producer's transport.
    """
    monkeypatch.setattr(writes, "SLICE_RUNS", 1)
    producer, consumer = worker("p", transport_class=Scripted), worker("c")
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    return producer, consumer, scripted(producer)


def posting(producer: Worker, number: int) -> None:
    """Compute the prompt; return when the post of slice ``number`` has begun and does not end."""
    transport = scripted(producer)
    transport.slow = number
    producer.step(chunks=[WHOLE])
    assert transport.posting.wait(10.0)


def no_result(producer: Worker, consumer: Worker) -> None:
    for _ in range(3):
        producer.step()
        assert taken(consumer) == NOTHING


def test_a_post_delays_no_step_and_no_message(pair: tuple[Worker, Worker, Scripted]) -> None:
    producer, consumer, transport = pair
    posting(producer, 0)
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    until(lambda: consumer.runtime.counts()["offered"] == 2)
    producer.step(expects=[EXPECT])
    until(lambda: len(snapshot(producer.runtime).producer.offers) == 2)
    assert not transport.overdue, "a step or a message waited for the post"
    transport.gate.set()
    assert results(consumer) == ARRIVED
    assert (transport.posts, consumer.cache[[3, 5], 0].tolist()) == (2, [2, 3])


def test_an_abort_stops_the_slices(pair: tuple[Worker, Worker, Scripted]) -> None:
    """The consumer's blocks stay allocated until the slice that is being posted has ended."""
    producer, consumer, transport = pair
    posting(producer, 0)
    transport.held = True
    consumer.step(aborts=["r"])

    def given_up() -> bool:
        producer.step()
        return not producer.runtime._producer.wants(1)  # noqa: SLF001

    until(given_up)
    transport.gate.set()
    until(lambda: bool(transport._pending))  # noqa: SLF001 (the slice is in flight)
    no_result(producer, consumer)
    transport.held = False
    assert results(consumer) == FAILED
    assert consumer.runtime.report() is None
    assert (transport.posts, consumer.cache[[3, 5], 0].tolist()) == (1, [2, 0])


@pytest.mark.parametrize("number", [0, 1], ids=["first slice", "last slice"])
@pytest.mark.parametrize(
    ("call", "error", "kept"),
    [
        ("write", partial(TransportError, "c/0", "-"), False),
        ("write", partial(FailedWriteError, "c/0", "-"), True),
        ("write", partial(RuntimeError, "anything"), True),
        ("poll", partial(TransportError, "c/0", "-"), True),
        ("poll", partial(RuntimeError, "anything"), True),
    ],
)
def test_an_error_ends_its_delivery_only(
    pair: tuple[Worker, Worker, Scripted],
    caplog: pytest.LogCaptureFixture,
    call: str,
    error: partial[Exception],
    kept: bool,
    number: int,
) -> None:
    """It ends after the slices in flight. If parts may still arrive, decode's blocks go into
    quarantine; prefill's are freed: late bytes reach unused blocks.
    """
    producer, consumer, transport = pair
    transport.held = True
    # Only a post that has certainly posted nothing is tried again: a second write could end before
    # the bytes of the first arrive.
    transport.errors = {(call, each): error for each in range(number, number + (1 if kept else 2))}
    producer.step(chunks=[WHOLE])
    until(lambda: transport.posts > (1 if call == "poll" else number))
    if number or call == "poll":
        no_result(producer, consumer)
        assert producer.runtime.counts()["writes"] == 1
    transport.held = False
    assert results(consumer) == FAILED
    assert consumer.runtime.report() == (WorkerReport(begun=[Kept("r", "t")]) if kept else None)
    assert caplog.text.count("RuntimeError: anything") == (error.func is RuntimeError)
    producer.step(finished=[SENT])
    assert results(producer) == ({"q"}, set(), set())
    assert not transport._pending  # noqa: SLF001
    assert not kept or transport.posts == (2 if call == "poll" else number + 1)
    transport.errors = {}
    assert transfer(producer, consumer, "2") == (set(), {"r2"}, set())
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]
    until(lambda: not any(producer.runtime.counts()[stage] for stage in ("early", "live", "held", "writes")))


@pytest.mark.parametrize("memory", ["VRAM", "DRAM"])
def test_a_post_from_a_device_is_polled_without_pauses(worker: Make, memory: str) -> None:
    producer, _ = both_ends(worker, memory_kind=MemoryKind(memory, 0))
    pauses = []
    for posted_at in (float("inf"), float("-inf")):  # just now, long ago
        producer.runtime._writes.posted_at = posted_at  # noqa: SLF001
        pauses.append(producer.runtime._pause_s())  # noqa: SLF001
    on_device = [runtime._SPIN_PAUSE_S, runtime._BUSY_S]  # noqa: SLF001
    assert pauses == (on_device if memory == "VRAM" else [runtime._BUSY_S] * 2)  # noqa: SLF001


def test_a_slow_write_is_logged_once(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each counts in the metric. Between host memories, no bandwidth is expected."""
    monkeypatch.setattr(writes, "is_slow", lambda *_: True)
    gpu, host, other = worker("gpu", memory_kind=VRAM), worker("host"), worker("other")
    for number, (source, target) in enumerate([(gpu, host), (host, gpu), (gpu, host), (host, other)]):
        assert transfer(source, target, str(number))[2] == set()
    stats = gpu.runtime.stats(), host.runtime.stats()
    assert [each and each.data["counts"]["writes"] for each in stats] == [{"slow": 2}, {"slow": 1, "done": 1}]
    assert caplog.text.count("UCX probably copies it through host memory") == 2, "one a worker"


@pytest.mark.parametrize(
    ("size_bytes", "runs", "seconds", "slow"),
    [
        (2**30, 1024, 0.6, True),
        (2**30, 1024, 0.5, False),
        (2**30, 16_384, 0.6, False),  # posting takes the time
        (2**25, 32, 9.0, False),  # too small
    ],
)
def test_a_slow_write(size_bytes: int, runs: int, seconds: float, slow: bool) -> None:
    assert writes.is_slow(size_bytes, runs, seconds) == slow


# ---- layers of a step --------------------------------------------------------------------------


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
    """Chunks of the next step wait, too: layers of this step must not complete them. What a request
    has lost is dropped.
    """
    fence = SlowFence()
    steps = Steps(GROUPS, fence)
    steps.begin([FIRST])
    steps.layer("a")
    steps.end([FIRST])
    steps.begin([FIRST, SECOND])
    assert list(steps.passed()) == [Begun((FIRST,))]
    fence.done.add(fence.marked[0])
    assert list(steps.passed()) == [LayersComputed(("q",), 0, 1)]
    steps.layer("b")
    steps.end([FIRST, SECOND])
    steps.drop("q")
    fence.done.update(fence.marked)
    assert list(steps.passed()) == [
        Ended((), frozenset({"q"})),
        Begun((SECOND,)),
        LayersComputed(("r",), 1, 1),
        Ended((SECOND,), frozenset({"q", "r"})),
    ]


@pytest.mark.parametrize(
    ("streaming", "memory", "early"),
    [("layer", "DRAM", True), ("auto", "DRAM", True), ("chunk", "DRAM", False), ("auto", "VRAM", False)],
)
def test_whether_layers_leave_before_the_step_ends(worker: Make, streaming: str, memory: str, early: bool) -> None:
    """Those of the last chunk do; Fin follows the step. Earlier chunks overlap with the next."""
    kind = MemoryKind(memory, 0)
    producer = worker("p", streaming=streaming, memory_kind=kind, transport_class=Scripted)
    consumer = worker("c", memory_kind=kind)
    live(producer, consumer)
    for chunk in (Chunk("q", ((1,),), 4), Chunk("q", ((2,),), 7, True)):
        orders = Orders(chunks=[chunk])
        producer.runtime.before_forward(orders)
        producer.runtime.layer_computed("layer")
        if early and chunk.last:
            until(lambda: consumer.cache[[3, 5], 0].tolist() == [2, 3])
        else:
            taken(producer)
            assert not producer.runtime.counts()["writes"]
        assert taken(consumer) == NOTHING
        producer.runtime.after_forward(orders)
        until(lambda: consumer.cache[3, 0] == 2 and not producer.runtime.counts()["writes"])
    if not early:
        producer.step(finished=[SENT])
    assert results(consumer) == ARRIVED


# ---- digests, messages and the trace -----------------------------------------------------------


@pytest.mark.parametrize("integrity", ["auto", "off"])
@pytest.mark.parametrize("memory_kinds", ["DRAM DRAM", "VRAM VRAM", "VRAM DRAM", "DRAM VRAM"])
def test_damaged_bytes_fail_the_transfer(
    worker: Make, caplog: pytest.LogCaptureFixture, memory_kinds: str, integrity: str
) -> None:
    """Clean transfers pass; ``off`` requests no digest. Tensors are on the CPU here."""
    prefill, decode = (MemoryKind(memory, 0) for memory in memory_kinds.split())
    producer = worker("p", transport_class=Scripted, memory_kind=prefill)
    consumer = worker("c", integrity=integrity, memory_kind=decode)
    assert transfer(producer, consumer) == ARRIVED
    scripted(producer).damages = True
    assert transfer(producer, consumer, "2")[2] == (set() if integrity == "off" else {"r2"})
    assert caplog.text.count("rank 0: the received bytes differ") == (integrity != "off")
    gc.collect()
    until(lambda: not any(type(thing) is TransferDigest for thing in gc.get_objects()))


@pytest.mark.parametrize("own", [True, False])
def test_a_source_that_changes_under_a_write(worker: Make, own: bool) -> None:
    """The digest is of this request's bytes, not of bytes that the write reads later. The request's
    ``own`` last token, computed into the last block meanwhile, is no false alarm.
    """
    producer, consumer = worker("p", transport_class=Scripted), worker("c")
    transport = scripted(producer)
    transport.late = transport.held = True
    live(producer, consumer)
    producer.step(chunks=[Chunk("q", ((1, 2),), 6)] if own else [WHOLE])
    until(lambda: posted(producer))
    if own:
        producer.cache[2, -BLOCK_BYTES // 2 :] = 99
        producer.step(chunks=[Chunk("q", ((),), 7)])
    else:
        producer.cache[1] = 77
    transport.held = False
    assert results(consumer) == (ARRIVED if own else FAILED)
    assert not own or consumer.cache[5].tolist() == producer.cache[2].tolist()


def test_a_digest_that_breaks_at_the_end(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another write that ends in the same round is reported; nothing would repeat its ``Sent``."""
    producer, consumer = worker("p", transport_class=HeldWrites), worker("c")
    for name in ("a", "b"):
        consumer.step(receives=[receive(producer.address, f"r{name}", f"t{name}")])
        compute(producer, name)
    until(lambda: producer.runtime.counts()["writes"] == 2)
    producer.step(finished=[Finished(f"q{name}", True, "") for name in ("a", "b")])
    hexdigest, ended = TransferDigest.hexdigest, list[object]()

    def breaks_at_the_second(one: TransferDigest) -> str:
        ended.append(one)
        if len(ended) == 2:
            raise RuntimeError("no memory")
        return hexdigest(one)

    monkeypatch.setattr(TransferDigest, "hexdigest", breaks_at_the_second)
    let_go(producer)
    sent: set[str] = set()

    def both_sent() -> bool:
        sent.update(taken(producer)[0])
        taken(consumer)
        return sent == {"qa", "qb"}

    until(both_sent)


def test_one_action_does_not_cost_the_next(impatient: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose sending raises is lost, which deadlines cover; the actions after it are
    carried out.
    """
    producer, consumer = impatient("p"), impatient("c")
    send, intact = MessageSender.send, [True]

    def breaks_once(sender: MessageSender, peer: Peer, message: Message) -> None:
        if isinstance(message, Offer) and intact and intact.pop():
            raise RuntimeError("anything")
        send(sender, peer, message)

    assert transfer(producer, consumer) == ARRIVED
    monkeypatch.setattr(MessageSender, "send", breaks_once)
    consumer.step(receives=[receive(producer.address, "lost", "lost"), receive(producer.address, "lost-twin", "lost")])
    assert results(consumer) == (set(), {"lost-twin"}, {"lost-twin"})
    assert results(consumer) == (set(), {"lost"}, {"lost"})
    until(lambda: not any(consumer.runtime.counts().values()))


def test_a_trace_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace("/dev/full", "engine", 0)
    for request in ("r", "r2"):
        trace.event("sent", request=request)
    trace.close()
    assert caplog.text.count("cannot write to the trace file") == 1


def test_a_trace_is_read_while_it_is_written(tmp_path: Path) -> None:
    """An incomplete line, also of a killed process, is no event; the others are."""
    path = tmp_path / "trace.jsonl"
    trace = Trace(str(path), "engine", 0)
    trace.event("receive", spans={"a": 1})
    begun = path.stat().st_size
    trace.event("received")
    whole = path.read_bytes()

    def names(data: bytes, from_byte: int = 0) -> list[str]:
        path.write_bytes(data)
        return [event["event"] for event in read_trace(path, from_byte)]

    assert {tuple(names(whole[:length])) for length in range(begun, len(whole))} == {("receive",)}
    assert names(whole[:-3] + whole) == ["receive", "received"]
    assert names(whole[:-3] + whole, len(whole) - 3 + begun) == ["received"]


# ---- threads and devices -----------------------------------------------------------------------

THREADS = {f"tandem-{name}" for name in ("progress", "connect", "accept", "verify", "probe")}
"""Those of the engine core that answer sockets and watch a process need no device."""


def test_every_thread_of_a_worker_sets_its_device(monkeypatch: pytest.MonkeyPatch, worker: Make) -> None:
    """Every one that calls NIXL or reads the KV cache."""
    seen: dict[int, torch.device] = {}
    monkeypatch.setattr(runtime, "set_thread_device", lambda device: seen.__setitem__(threading.get_ident(), device))
    others = set(threading.enumerate())
    producer, consumer = worker("p", integrity="full"), worker("c", integrity="full")
    assert transfer(producer, consumer) == ARRIVED
    suspect = Suspect(Peer("nobody", 0), own_process(), True, None)
    consumer.runtime._probe.watch([suspect], [])  # noqa: SLF001 (no transfer has to fail for it)

    def started() -> dict[str, int | None]:
        new = [thread for thread in threading.enumerate() if thread not in others]
        found = {each.name.rstrip("0123456789_"): each.ident for each in new}
        return {name: ident for name, ident in found.items() if name in THREADS}

    until(lambda: started().keys() == THREADS)
    assert set(started().values()) <= seen.keys()
    assert set(seen.values()) == {torch.device("cpu")}


@pytest.mark.parametrize("thread", ["tandem-verify", "tandem-progress"])
def test_a_thread_without_a_device(monkeypatch: pytest.MonkeyPatch, worker: Make, thread: str) -> None:
    """The device may be full. Nothing else would end the wait for a comparison, and no deadline
    would pass without the progress thread.
    """

    def full(_: object = None) -> None:
        if threading.current_thread().name.startswith(thread):
            raise RuntimeError("no memory on the device")

    monkeypatch.setattr(runtime, "set_thread_device", full)
    if thread == "tandem-progress":
        with pytest.raises(RuntimeError, match="no memory"):
            ProgressThread(lambda: 1.0, 1.0, full).start()
    else:
        assert transfer(worker("p", integrity="full"), worker("c", integrity="full")) == FAILED


def test_the_platform_sets_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform also creates the thread's CUDA context, which UCX needs; a CPU has none.

    Once per thread: it allocates a tensor and launches a kernel.
    """
    calls: list[Any] = []

    class Platform:
        def set_device(self, device: torch.device) -> None:
            calls.append(device)
            if len(calls) == 1:
                raise RuntimeError("no memory on the device")

    def in_a_thread() -> None:
        for _ in range(2):
            accelerator.set_thread_device(torch.device("cpu"))
            accelerator.set_thread_device(torch.device("cuda", 3))

    monkeypatch.setattr(accelerator, "current_platform", Platform())
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(RuntimeError, match="no memory"):
            thread.submit(in_a_thread).result()
        thread.submit(in_a_thread).result()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(in_a_thread).result()
    assert calls == [torch.device("cuda", 3)] * 3


@pytest.mark.parametrize(
    ("integrity", "capability", "refused"),
    [
        ("off", (8, 9), True),
        ("off", None, True),
        ("off", (9, 0), False),
        ("auto", (8, 0), False),
        ("full", None, False),
    ],
)
def test_kv_is_used_without_a_digest_only_where_kernels_see_it(
    integrity: str, capability: tuple[int, int] | None, refused: bool
) -> None:
    """Before Hopper, kernels may not see what an RDMA write has changed."""
    with pytest.raises(ConfigurationError, match="set it to auto") if refused else nullcontext():
        accelerator.check_integrity(integrity, capability)
