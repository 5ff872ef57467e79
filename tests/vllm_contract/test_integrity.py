"""Decode never uses bytes damaged between two workers, on hosts and accelerators."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from connectors.planning.layout import MemoryKind
from connectors.transport.digest import TransferDigest
from connectors.vllm_hma.orders import Chunk
from tests.vllm_contract.workers import (
    ARRIVED,
    BLOCK_BYTES,
    EXPECT,
    FAILED,
    WHOLE,
    Scripted,
    Worker,
    posted,
    receive,
    results,
    scripted,
    transfer,
    until,
)


@pytest.mark.parametrize("integrity", ["full", "auto", "off"])
@pytest.mark.parametrize("memory_kinds", ["DRAM DRAM", "VRAM VRAM", "VRAM DRAM", "DRAM VRAM"])
def test_damaged_bytes_fail_the_transfer(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture, memory_kinds: str, integrity: str
) -> None:
    """Clean transfers pass. After a damaged one, the consumer computes the request, and the log
    names the rank; auto is full. ``off`` requests no digest. Tensors are on the CPU here.
    """
    prefill, decode = (MemoryKind(memory, 0) for memory in memory_kinds.split())
    producer = worker("p", transport_class=Scripted, memory_kind=prefill)
    consumer = worker("c", integrity=integrity, memory_kind=decode)
    assert transfer(producer, consumer) == ARRIVED
    scripted(producer).damages = True
    assert transfer(producer, consumer, "2")[2] == (set() if integrity == "off" else {"r2"})
    assert caplog.text.count("rank 0: the received bytes differ from the bytes sent") == (integrity != "off")


def test_no_digest_outlives_its_transfer(worker: Callable[..., Worker]) -> None:
    """No digest remains of a good or a damaged transfer."""
    producer, consumer = worker("p", transport_class=Scripted), worker("c")
    assert transfer(producer, consumer) == ARRIVED
    scripted(producer).damages = True
    transfer(producer, consumer, "2")
    gc.collect()
    until(lambda: not any(type(thing) is TransferDigest for thing in gc.get_objects()))


@pytest.mark.parametrize("own", [True, False])
def test_a_source_that_changes_under_a_write(worker: Callable[..., Worker], own: bool) -> None:
    """The digest is of this request's bytes, not of bytes that the write reads later. The request's
    ``own`` last token, computed into the last block meanwhile, is no false alarm.
    """
    producer, consumer = worker("p", transport_class=Scripted), worker("c")
    transport = scripted(producer)
    transport.late = transport.held = True
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    until(lambda: consumer.runtime.counts()["offered"] == producer.runtime.counts()["live"] == 1)
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


def test_a_verification_that_breaks_ends_the_request(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a comparison fails, the request receives its result."""
    add = TransferDigest.add

    def broken(digest: TransferDigest, group: int, ids: np.ndarray, *rest: object) -> None:
        if ids.tolist() == [3, 5]:
            raise RuntimeError("anything")
        add(digest, group, ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TransferDigest, "add", broken)
    assert transfer(worker("p"), worker("c")) == FAILED
