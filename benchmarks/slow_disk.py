"""TandemConnector with a disk of limited bandwidth, and requests that fix the store's decision.

``benchmarks.store_choice`` loads this module in its engines, by ``kv_connector_module_path``. The
first part of a request id is its mode:

    plain   the store neither loads nor stores the request's KV
    always  the store loads all stored KV, at any price
    (else)  the store decides
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from connectors.store.fetch import Fetch
from connectors.store.tiers.files import Files
from connectors.store.tiers.open_folder import OpenFolder
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.kv_store.requests import StoreRequest
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler

if TYPE_CHECKING:
    from vllm.v1.request import Request

RATE_VARIABLE = "TANDEM_BENCH_DISK_RATE"
"""Environment variable with the path of a file that holds the bandwidth in bytes per second."""


class Disk:
    """Limits the sum of all threads' reads to the bandwidth in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._free_at = 0.0

    def read(self, size_bytes: int) -> None:
        """Return when a disk of this bandwidth would have delivered ``size_bytes`` more."""
        seconds = size_bytes / float(self._path.read_text())
        with self._lock:
            self._free_at = ready_at = max(self._free_at, time.monotonic()) + seconds
        time.sleep(max(0.0, ready_at - time.monotonic()))


class SlowDiskConnector(TandemConnector):
    """See the module."""

    def on_new_request(self, request: Request) -> None:
        if request.request_id.startswith("plain"):
            self.scheduler.new_request(request)
        else:
            super().on_new_request(request)


def _limit_reads(disk: Disk) -> None:
    read = Files.read

    def slow_read(
        self: Files, folder: OpenFolder, name: str, payload: memoryview, piece_read: Callable[[memoryview], None]
    ) -> tuple[bytes, os.stat_result]:
        def piece(data: memoryview) -> None:
            disk.read(data.nbytes)
            piece_read(data)

        return read(self, folder, name, payload, piece)

    Files.read = slow_read  # type: ignore[method-assign]


def _obey_modes() -> None:
    begin, decide = StoreScheduler._begin_fetch, Fetch._decide
    always: WeakSet[Fetch] = WeakSet()

    def begin_fetch(self: StoreScheduler, known: StoreRequest, *arguments: Any, **named: Any) -> Fetch | None:
        fetch = begin(self, known, *arguments, **named)
        if fetch is not None and known.request.request_id.startswith("always"):
            always.add(fetch)
        return fetch

    def obey(self: Fetch) -> None:
        if self in always:
            self._fit()
        else:
            decide(self)

    StoreScheduler._begin_fetch = begin_fetch  # type: ignore[method-assign]
    Fetch._decide = obey  # type: ignore[method-assign]


if RATE_VARIABLE in os.environ:  # only engines have it
    _limit_reads(Disk(Path(os.environ[RATE_VARIABLE])))
    _obey_modes()
