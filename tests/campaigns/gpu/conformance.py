"""Contract of a transport between two processes with memory of one device: on a GPU, over CUDA IPC.

``tests/transport/test_conformance.py`` has the full contract, over host memory of one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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


def check(condition: bool, problem: str) -> None:
    """Raise AssertionError with ``problem`` unless ``condition``; these checks also run without
    pytest.
    """
    if not condition:
        raise AssertionError(problem)


def compare(pair: Pair, expected: np.ndarray) -> None:
    """Check that the other process's pages hold exactly ``expected``."""
    found = np.frombuffer(pair.call("read"), np.uint8)
    wrong = np.flatnonzero(found != expected)
    check(not len(wrong), f"{len(wrong)} bytes of {SIZE} are wrong, the first at {wrong[:1].tolist()}")


def source(pair: Pair) -> np.ndarray:
    return np.frombuffer(pair.ours.read(), np.uint8)


def a_write_moves_its_bytes_and_no_others(pair: Pair) -> str:
    """Odd addresses and lengths; the bytes around them do not change."""
    pair.write(pair.runs((3, 1001, 777), (5000, 0, 1)))
    expected, ours = np.full(SIZE, CANARY, np.uint8), source(pair)
    expected[1001:1778] = ours[3:780]
    expected[0] = ours[5000]
    compare(pair, expected)
    return f"778 of {SIZE} bytes"


def a_whole_region_is_written(pair: Pair) -> str:
    """A write covers a region from the first byte to the last."""
    pair.write(pair.runs((0, 0, SIZE)))
    compare(pair, source(pair))
    return f"{SIZE} bytes"


def ten_thousand_fragments(pair: Pair) -> str:
    """One write of 10,000 runs of 64 bytes in reverse order."""
    at = np.arange(10_000, dtype=np.int64) * 100
    length = np.full(10_000, 64, np.int64)
    pair.write(Runs(pair.ours.pages.data_ptr() + at[::-1], pair.theirs.pages + at, length))
    expected, ours = np.full(SIZE, CANARY, np.uint8), source(pair)
    for src, dst in zip(at[::-1].tolist(), at.tolist(), strict=True):
        expected[dst : dst + 64] = ours[src : src + 64]
    compare(pair, expected)
    return "10000 runs"


def many_writes_at_once(pair: Pair) -> str:
    """Post 50 writes at once; each handle ends independently."""
    open_handles = {pair.post(pair.runs((64 * k, 128 * k, 64))) for k in range(50)}
    check(len(open_handles) == 50, "handles are not distinct")

    def ended() -> bool:
        open_handles.difference_update({each for each in open_handles if pair.ours.transport.poll(each)})
        return not open_handles

    until(ended, "50 writes")
    expected, ours = np.full(SIZE, CANARY, np.uint8), source(pair)
    for k in range(50):
        expected[128 * k : 128 * k + 64] = ours[64 * k : 64 * k + 64]
    compare(pair, expected)
    return "50 writes"


def writes_outside_registered_memory_are_refused(pair: Pair) -> str:
    """A write one byte outside, on either side, raises TransportError and writes no byte."""
    for row in ((-1, 0, 8), (SIZE - 7, 0, 8), (0, -1, 8), (0, SIZE - 7, 8)):
        try:
            pair.write(pair.runs((0, 0, 8), row))
        except TransportError:
            continue
        raise AssertionError(f"a write of {row} (our offset, their offset, bytes) was not refused")
    compare(pair, np.full(SIZE, CANARY, np.uint8))
    pair.write(pair.runs((0, 0, 8)))
    return "4 refused, the next write arrives"


def poll_waits_for_the_last_byte(pair: Pair) -> str:
    """A message sent after a write's end finds all of its bytes, 10 times."""
    for number in range(10):
        pair.ours.fill(bytes([number]))
        pair.write(pair.runs((0, 0, SIZE)))
        pair.ours.transport.notify(pair.peer, b"written")
        check(pair.messages(1) == [(pair.us, b"written")], "another message came")
        compare(pair, np.full(SIZE, number, np.uint8))
    return "10 writes"


def messages_arrive_whole_and_once(pair: Pair) -> str:
    """Messages have up to 1 MiB and go both ways."""
    payloads = [b"", b"hello", bytes(range(256)), np.random.default_rng(0).bytes(2**20)]
    for payload in payloads:
        pair.ours.transport.notify(pair.peer, payload)
    found = pair.messages(len(payloads))
    check(sorted(found) == sorted((pair.us, each) for each in payloads), "other messages came")
    check(pair.call("take_messages") == [], "a message came twice")
    pair.call("notify", pair.us, b"answer")
    answers: list[tuple[str, bytes]] = []

    def answered() -> bool:
        answers.extend(pair.ours.take_messages())
        return bool(answers)

    until(answered, "an answer")
    check(answers == [(pair.peer, b"answer")], "another answer came")
    return f"{len(payloads)} messages and an answer"


def a_connection_is_made_anew(pair: Pair) -> str:
    """After ``reconnect``, writes and messages arrive."""
    pair.ours.transport.reconnect(pair.peer)
    pair.write(pair.runs((0, 512, 512)))
    expected = np.full(SIZE, CANARY, np.uint8)
    expected[512:1024] = source(pair)[:512]
    compare(pair, expected)
    pair.ours.transport.notify(pair.peer, b"there")
    check(pair.messages(1) == [(pair.us, b"there")], "another message came")
    return "a write and a message"


def digests_agree(pair: Pair) -> str:
    """Both ends compute equal digests of the bytes moved; a flipped byte changes one."""
    src, dst = list(range(0, 100, 2)), list(range(200, 100, -2))
    pair.write(pair.runs(*((PAGE_BYTES * a, PAGE_BYTES * b, PAGE_BYTES) for a, b in zip(src, dst, strict=True))))
    sent = pair.ours.digest(src)
    check(pair.call("digest", dst) == sent, "the digests of the two ends differ")
    pair.write(pair.runs((1, PAGE_BYTES * dst[7] + 100, 1)))
    check(pair.call("digest", dst) != sent, "a byte was overwritten, and the digest is the same")
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
    compare(pair, source(pair))
    return "the write ended first" if still_busy else "the device was idle, or the write waited for it"


def bandwidth(pair: Pair) -> tuple[str, dict[str, Any]]:
    """Writes of scattered runs between the processes, and the device's own copy.

    Medians, without a limit.
    """
    measured = []
    half = pair.bulk_bytes // 2
    copied_s = []
    for _ in range(REPEATS):
        synchronize(pair.device)
        began = time.perf_counter()
        pair.ours.bulk[half:].copy_(pair.ours.bulk[:half])
        synchronize(pair.device)
        copied_s.append(time.perf_counter() - began)
    for kib in RUN_KIB:
        length = kib * 1024
        at = np.arange(0, pair.bulk_bytes - length + 1, 2 * length, dtype=np.int64)
        runs = Runs(
            pair.ours.bulk.data_ptr() + at,
            pair.theirs.bulk + np.random.default_rng(kib).permutation(at),
            np.full(len(at), length, np.int64),
        )
        took_s, posting_s = [], []
        for _ in range(REPEATS):
            began = time.perf_counter()
            handle = pair.post(runs)
            posting_s.append(time.perf_counter() - began)
            until(lambda handle=handle: pair.ours.transport.poll(handle), "a write")  # type: ignore[misc]
            took_s.append(time.perf_counter() - began)
        measured.append((kib, runs.total_bytes / np.median(took_s) / 1e9, 1e6 * np.median(posting_s) / len(at)))
    own = half / np.median(copied_s) / 1e9
    shown = ", ".join(
        f"{kib} KiB {speed:.2f} GB/s ({speed / own:.2f}), {us:.2f} us a run" for kib, speed, us in measured
    )
    figures = {f"{kib} KiB": {"GB_s": round(speed, 2), "post_us_a_run": round(us, 2)} for kib, speed, us in measured}
    return f"{shown}; own copy {own:.2f} GB/s (1)", figures | {"own copy": {"GB_s": round(own, 2)}}


CASES: tuple[Callable[[Pair], Any], ...] = (
    a_write_moves_its_bytes_and_no_others,
    a_whole_region_is_written,
    ten_thousand_fragments,
    many_writes_at_once,
    writes_outside_registered_memory_are_refused,
    poll_waits_for_the_last_byte,
    messages_arrive_whole_and_once,
    a_connection_is_made_anew,
    digests_agree,
    a_busy_device_does_not_delay_a_write,
    bandwidth,
)
"""Checks; each is called after ``Pair.refill`` and returns its observation, or raises. The last one
returns figures, too.
"""
