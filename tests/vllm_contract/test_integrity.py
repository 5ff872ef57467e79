"""Decode never uses bytes damaged between two workers, on hosts and accelerators."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import numpy as np
import pytest

from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind
from connectors.transport.digest import TransferDigest
from connectors.vllm_hma.orders import Chunk, Expect, Finished
from testing.memory_transport import Fabric, MemoryTransport
from tests.vllm_contract.workers import BLOCK_BYTES, DIGEST, Worker, posted, receive, results, until


class Damaging(MemoryTransport):
    """Writes arrive with one bit flipped in their last byte."""

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        handle = super().write(peer, runs, source, target)
        last = int(runs.dst[-1] + runs.length[-1]) - 1
        ctypes.c_uint8.from_address(last).value ^= 1
        return handle


class Late(MemoryTransport):
    """Transport that reads its source at the poll after ``let_go``, as RDMA may read at any moment
    until then.
    """

    let_go = False

    def __init__(self, name: str, fabric: Fabric) -> None:
        super().__init__(name, fabric)
        self.posted: dict[int, tuple[str, Runs, MemoryKind, MemoryKind]] = {}

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        self.posted[len(self.posted) + 1] = (peer, runs, source, target)
        return len(self.posted)

    def poll(self, handle: int) -> bool:
        return self.let_go and super().poll(super().write(*self.posted[handle]))


def transfer(producer: Worker, consumer: Worker) -> tuple[set[str], set[str], set[str]]:
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    producer.step(chunks=[Chunk("q", ((1,),), 4)])
    producer.step(chunks=[Chunk("q", ((2,),), 7)])
    producer.step(finished=[Finished("q", True, "")])
    outcome = results(consumer)
    assert results(producer) == ({"q"}, set(), set())
    return outcome


def both(worker: Callable[..., Worker], integrity: str, transport: type[MemoryTransport]) -> tuple[Worker, Worker]:
    producer = worker("p", transport_class=transport)
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    return producer, worker("c", integrity=integrity)


@pytest.mark.parametrize("integrity", ["full", "auto"])
def test_damaged_bytes_fail_the_transfer(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture, integrity: str
) -> None:
    """The consumer computes the request, and the log names the rank with different bytes. auto
    is full.
    """
    assert transfer(*both(worker, integrity, Damaging)) == (set(), {"r"}, {"r"})
    assert "rank 0: the received bytes differ from the bytes sent" in caplog.text


def test_integrity_off_compares_nothing(worker: Callable[..., Worker]) -> None:
    """Without digests the same damage is undetected: the digest finds it."""
    assert transfer(*both(worker, "off", Damaging)) == (set(), {"r"}, set())


def test_no_digest_outlives_its_transfer(worker: Callable[..., Worker]) -> None:
    """No digest remains of a good or a damaged transfer."""
    transfer(*both(worker, "full", MemoryTransport))
    transfer(worker("p2", transport_class=Damaging), worker("c2"))
    gc.collect()
    until(lambda: not any(type(thing) is TransferDigest for thing in gc.get_objects()))


def test_a_chunk_that_ends_before_the_last_token_is_no_false_alarm(worker: Callable[..., Worker]) -> None:
    """The last prompt token is computed into the last block while earlier writes still read it."""
    producer, consumer = both(worker, "full", Late)
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    until(lambda: consumer.runtime.counts()["offered"] == producer.runtime.counts()["live"] == 1)
    producer.step(chunks=[Chunk("q", ((1, 2),), 6)])
    until(lambda: posted(producer))
    producer.cache[2, -BLOCK_BYTES // 2 :] = 99
    producer.step(chunks=[Chunk("q", ((),), 7)])
    assert isinstance(producer.transport, Late)
    producer.transport.let_go = True
    assert results(consumer) == (set(), {"r"}, set())
    assert consumer.cache[5].tolist() == producer.cache[2].tolist()


def test_a_source_that_changes_under_a_write_is_found(worker: Callable[..., Worker]) -> None:
    """The digest is of this request's bytes, not of bytes that the write has read later."""
    producer, consumer = both(worker, "full", Late)
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    producer.step(chunks=[Chunk("q", ((1, 2),), 7)])
    until(lambda: posted(producer))
    producer.cache[1] = 77
    assert isinstance(producer.transport, Late)
    producer.transport.let_go = True
    assert results(consumer) == (set(), {"r"}, {"r"})


def test_a_verification_that_breaks_ends_the_request(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a comparison fails, the request receives its result."""
    producer, consumer = both(worker, "full", MemoryTransport)
    add = TransferDigest.add

    def broken(digest: TransferDigest, group: int, ids: np.ndarray, *rest: object) -> None:
        if ids.tolist() == [3, 5]:
            raise RuntimeError("anything")
        add(digest, group, ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TransferDigest, "add", broken)
    assert transfer(producer, consumer) == (set(), {"r"}, {"r"})


@pytest.mark.parametrize("integrity", ["full", "auto"])
@pytest.mark.parametrize("memory_kinds", ["VRAM VRAM", "VRAM DRAM", "DRAM VRAM"])
def test_digests_where_a_cache_is_on_an_accelerator(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture, memory_kinds: str, integrity: str
) -> None:
    """With digests of either side or both, clean transfers pass and damaged ones fail.

    Tensors are on the CPU here.
    """
    prefill, decode = (MemoryKind(memory, 0) for memory in memory_kinds.split())
    for transport, failed in ((MemoryTransport, set()), (Damaging, {"r"})):
        name = transport.__name__
        producer = worker(f"p-{name}", transport_class=transport, memory_kind=prefill)
        producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
        consumer = worker(f"c-{name}", integrity=integrity, memory_kind=decode)
        assert transfer(producer, consumer) == (set(), {"r"}, failed)
    assert caplog.text.count("the received bytes differ from the bytes sent") == 1


def test_integrity_off_on_an_accelerator(worker: Callable[..., Worker]) -> None:
    """No digest is requested and none is computed, so damage is undetected there as well."""
    producer = worker("p", transport_class=Damaging, memory_kind=MemoryKind("VRAM", 0))
    assert transfer(producer, worker("c", integrity="off", memory_kind=MemoryKind("VRAM", 0))) == (set(), {"r"}, set())
