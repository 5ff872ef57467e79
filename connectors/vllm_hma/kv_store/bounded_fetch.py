"""One request's fetch from the KV store, and how long the request waits for it.

Without the store, a transfer or the engine's own computation supplies the same tokens. The request
waits no longer than this would take (``store/load_costs.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from connectors.store.fetches import Fetched
from connectors.store.load_costs import LoadCosts
from connectors.store.planning.prefix import ObjectRef
from connectors.store.service import KVStore
from connectors.store.settings import StoreSettings
from connectors.store.tiers.objects import ObjectName


class BoundedFetch:
    """Fetch of one request.

    ``costs``            measured rates that decide whether to load, and how long to wait
    ``settings``         ``lookup_s``: time after which the request does not wait for a fetch that
                         makes no progress; ``always_load``
    ``beside_transfer``  whether a transfer supplies what is not loaded: the fetch then reads only
                         full attention, and the transfer's time bounds the wait. Otherwise the time
                         of the computation bounds it
    """

    def __init__(
        self, store: KVStore, costs: LoadCosts, settings: StoreSettings, request_id: str, beside_transfer: bool
    ) -> None:
        self._store = store
        self._costs = costs
        self._settings = settings
        self._request_id = request_id
        self.beside_transfer = beside_transfer
        # Time that the request may wait for the fetch, in seconds; known after the lookups, which
        # have a deadline of their own.
        self._patience_s = math.inf
        # Whether the request waits for something else as well, so that waiting costs nothing.
        self._queued = False
        # Time since which only the fetch delays the request, on `time.monotonic`; None before.
        self._ready_at: float | None = None
        # Start of the reads: a step may lie between the first poll and the next one.
        self._reading_at = 0.0

    @property
    def waits(self) -> bool:
        """True if the request waits for its reads; False if it reads only while it is queued."""
        return self._patience_s > 0

    def begin(self, names: Mapping[ObjectRef, ObjectName], start_token: int, limit_token: int) -> None:
        """Start the fetch.

        ``names``  names of the ``possible_objects`` from ``start_token`` to ``limit_token``
        """
        self._store.fetches.begin(
            self._request_id, names, start_token, limit_token, self.beside_transfer, self._worth_a_wait
        )

    def poll(self, queued: bool = False) -> Fetched | None:
        """Continue the fetch, which ``begin`` has started. Return its result, or None to wait.

        Stops the fetch when only the fetch has delayed the request for ``LoadCosts.patience_s``, or
        for ``lookup_s`` if no read has progressed for ``lookup_s``.

        ``queued``  whether the request could not run without the fetch either
        """
        fetches, self._queued = self._store.fetches, queued
        fetched = fetches.poll(self._request_id)
        if fetched is not None:
            return fetched
        if queued:
            return None
        now = time.monotonic()
        self._ready_at = ready_at = now if self._ready_at is None else self._ready_at
        waited_s = now - max(ready_at, self._reading_at)
        if waited_s < self._patience_s and min(waited_s, fetches.idle_s(self._request_id)) < self._settings.lookup_s:
            return None
        fetches.stop(self._request_id)
        fetched = fetches.poll(self._request_id)
        assert fetched is not None, "the fetch was stopped"
        return fetched

    def _worth_a_wait(self, start_token: int, end_token: int, sizes: Mapping[str, int]) -> bool:
        """Set the patience; return whether to read. Called once, after the lookups."""
        costs, self._reading_at = self._costs, time.monotonic()
        if self._settings.always_load and not self.beside_transfer:
            return True
        if self.beside_transfer:
            otherwise_s = costs.transfer_s(sum(sizes.values()))
        else:
            otherwise_s = costs.compute_s(start_token, end_token)
        self._patience_s = costs.patience_s(sizes, otherwise_s)
        return self._patience_s > 0 or self._queued
