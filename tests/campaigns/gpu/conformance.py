"""Contract of a transport between two processes with memory of one device: on a GPU, over CUDA IPC.

``tests/transport/test_conformance.py`` has the full contract, over host memory of one process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from connectors.errors import TransportError
from connectors.planning.descriptors import Runs
from tests.campaigns.gpu.device import keep_busy, synchronize, until
from tests.campaigns.gpu.pair import CANARY, PAGE_BYTES, PAGES, Pair

SIZE = PAGES * PAGE_BYTES
RUN_KIB = (32, 256, 2048)
REPEATS = 5


def _compare(pair: Pair, rows: Sequence[tuple[int, int, int]]) -> None:
    """Check that the other process's pages have our bytes of ``rows``, and canaries elsewhere."""
    ours, expected = np.frombuffer(pair.ours.read(), np.uint8), np.full(SIZE, CANARY, np.uint8)
    for src, dst, length in rows:
        expected[dst : dst + length] = ours[src : src + length]
    wrong = np.flatnonzero(np.frombuffer(pair.call("read"), np.uint8) != expected)
    assert not len(wrong), f"{len(wrong)} bytes of {SIZE} are wrong, the first at {wrong[:1].tolist()}"


def _write(pair: Pair, *rows: tuple[int, int, int]) -> None:
    pair.write(pair.runs(*rows))
    _compare(pair, rows)


def a_write_moves_its_bytes_and_no_others(pair: Pair) -> str:
    """Odd addresses and lengths; the bytes around them do not change."""
    _write(pair, (3, 1001, 777), (5000, 0, 1))
    return f"778 of {SIZE} bytes"


def a_whole_region_is_written(pair: Pair) -> str:
    """A write covers a region from the first byte to the last."""
    _write(pair, (0, 0, SIZE))
    return f"{SIZE} bytes"


def ten_thousand_fragments(pair: Pair) -> str:
    """One write of 10,000 runs of 64 bytes in reverse order."""
    _write(pair, *((100 * (9_999 - k), 100 * k, 64) for k in range(10_000)))
    return "10000 runs"


def many_writes_at_once(pair: Pair) -> str:
    """Post 50 writes at once; each handle ends independently."""
    rows = [(64 * k, 128 * k, 64) for k in range(50)]
    open_handles = {pair.post(pair.runs(row)) for row in rows}
    assert len(open_handles) == 50, "handles are not distinct"

    def ended() -> bool:
        open_handles.difference_update({each for each in open_handles if pair.ours.transport.poll(each)})
        return not open_handles

    until(ended, "50 writes")
    _compare(pair, rows)
    return "50 writes"


def writes_outside_registered_memory_are_refused(pair: Pair) -> str:
    """A write one byte outside, on either side, raises TransportError and writes no byte."""
    for row in ((-1, 0, 8), (SIZE - 7, 0, 8), (0, -1, 8), (0, SIZE - 7, 8)):
        try:
            pair.write(pair.runs((0, 0, 8), row))
        except TransportError:
            continue
        raise AssertionError(f"a write of {row} (our offset, their offset, bytes) was not refused")
    _compare(pair, ())
    pair.write(pair.runs((0, 0, 8)))
    return "4 refused, the next write arrives"


def poll_waits_for_the_last_byte(pair: Pair) -> str:
    """A message sent after a write's end finds all of its bytes, 10 times."""
    for number in range(10):
        pair.ours.fill(bytes([number]))
        pair.write(pair.runs((0, 0, SIZE)))
        pair.ours.transport.notify(pair.peer, b"written")
        assert pair.messages(1) == [(pair.us, b"written")], "another message came"
        _compare(pair, [(0, 0, SIZE)])
    return "10 writes"


def messages_arrive_whole_and_once(pair: Pair) -> str:
    """Messages have up to 1 MiB and go both ways."""
    payloads = [b"", b"hello", bytes(range(256)), np.random.default_rng(0).bytes(2**20)]
    for payload in payloads:
        pair.ours.transport.notify(pair.peer, payload)
    found = pair.messages(len(payloads))
    assert sorted(found) == sorted((pair.us, each) for each in payloads), "other messages came"
    assert pair.call("take_messages") == [], "a message came twice"
    pair.call("notify", pair.us, b"answer")
    answers = until(pair.ours.take_messages, "an answer")
    assert answers == [(pair.peer, b"answer")], "another answer came"
    return f"{len(payloads)} messages and an answer"


def a_connection_is_made_anew(pair: Pair) -> str:
    """After ``reconnect``, writes and messages arrive."""
    pair.ours.transport.reconnect(pair.peer)
    _write(pair, (0, 512, 512))
    pair.ours.transport.notify(pair.peer, b"there")
    assert pair.messages(1) == [(pair.us, b"there")], "another message came"
    return "a write and a message"


def digests_agree(pair: Pair) -> str:
    """Both ends compute equal digests of the bytes moved; a flipped byte changes one."""
    src, dst = list(range(0, 100, 2)), list(range(200, 100, -2))
    pair.write(pair.runs(*((PAGE_BYTES * a, PAGE_BYTES * b, PAGE_BYTES) for a, b in zip(src, dst, strict=True))))
    sent = pair.ours.digest(src)
    assert pair.call("digest", dst) == sent, "the digests of the two ends differ"
    pair.write(pair.runs((1, PAGE_BYTES * dst[7] + 100, 1)))
    assert pair.call("digest", dst) != sent, "a byte was overwritten, and the digest is the same"
    return f"{len(src)} pages"


def a_busy_device_does_not_delay_a_write(pair: Pair) -> str:
    """KV of one step is sent while the kernels of the next one run."""
    busy = None
    if pair.device.type != "cpu":
        keep_busy(pair.device, 2.0)
        busy = torch.Event(pair.device)
        busy.record()
    pair.write(pair.runs((0, 0, SIZE)))
    still_busy = busy is not None and not busy.query()
    synchronize(pair.device)
    _compare(pair, [(0, 0, SIZE)])
    return "the write ended first" if still_busy else "the device was idle, or the write waited for it"


def bandwidth(pair: Pair) -> tuple[str, dict[str, Any]]:
    """Medians of writes of scattered runs between the processes, and of the device's own copy."""
    half, copied_s = pair.bulk_bytes // 2, []
    for _ in range(REPEATS):
        synchronize(pair.device)
        began = time.perf_counter()
        pair.ours.bulk[half:].copy_(pair.ours.bulk[:half])
        synchronize(pair.device)
        copied_s.append(time.perf_counter() - began)
    own = half / np.median(copied_s) / 1e9
    shown, figures = [], {}
    for kib in RUN_KIB:
        length = kib * 1024
        at = np.arange(0, pair.bulk_bytes - length + 1, 2 * length, dtype=np.int64)
        targets = pair.theirs.bulk + np.random.default_rng(kib).permutation(at)
        runs = Runs(pair.ours.bulk.data_ptr() + at, targets, np.full(len(at), length, np.int64))
        took_s, posting_s = [], []
        for _ in range(REPEATS):
            began = time.perf_counter()
            handle = pair.post(runs)
            posting_s.append(time.perf_counter() - began)
            until(lambda handle=handle: pair.ours.transport.poll(handle), "a write")  # type: ignore[misc]
            took_s.append(time.perf_counter() - began)
        speed, us = runs.total_bytes / np.median(took_s) / 1e9, 1e6 * np.median(posting_s) / len(at)
        shown.append(f"{kib} KiB {speed:.2f} GB/s ({speed / own:.2f}), {us:.2f} us a run")
        figures[f"{kib} KiB"] = {"GB_s": round(speed, 2), "post_us_a_run": round(us, 2)}
    return f"{', '.join(shown)}; own copy {own:.2f} GB/s (1)", figures | {"own copy": {"GB_s": round(own, 2)}}
