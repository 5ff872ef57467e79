"""Decide how long a transfer waits for a stored prefix, and which transferred KV to store.

The store loads full attention of a prompt's first tokens. The transfer supplies full attention of
the tokens after them, and windows and states at the prompt's end (``docs/decisions/0050``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from connectors.planning.layout import GroupKind
from connectors.store.fetches import Fetched
from connectors.store.mixing import MixCosts
from connectors.store.planning.prefix import ObjectRef, completed_objects
from connectors.store.service import KVStore
from connectors.store.tiers.objects import ObjectName


class PrefixFetch:
    """Fetch of full attention for a request with a transfer, and the transfer's wait for it.

    ``costs``     rates that decide whether and how long the transfer waits
    ``lookup_s``  time after which a transfer that could start does not wait for a fetch that makes
                  no progress, in seconds
    """

    def __init__(self, store: KVStore, costs: MixCosts, lookup_s: float, request_id: str) -> None:
        self._store = store
        self._costs = costs
        self._lookup_s = lookup_s
        self._request_id = request_id
        # Time that the transfer may wait for the fetch, in seconds.
        self._patience_s = 0.0
        # Time since which only the fetch delays the transfer, on `time.monotonic`; None before.
        self._ready_at: float | None = None

    def begin(self, names: Mapping[ObjectRef, ObjectName], start_token: int, limit_token: int, queued: bool) -> None:
        """Start a fetch of the objects in ``names``, if it can save time.

        It cannot if no object can exist, or if a transfer that can start now would be as fast.

        ``names``   names of the ``possible_objects`` of full attention from ``start_token`` to
                    ``limit_token``
        ``queued``  whether the transfer cannot start yet, so waiting costs nothing
        """
        if not names:
            return
        self._patience_s = self._costs.patience_s(self._store.object_bytes(names))
        if self._patience_s or queued:
            self._store.fetches.begin(self._request_id, names, start_token, limit_token, full_attention_only=True)

    def poll(self, queued: bool) -> Fetched | None:
        """Continue the fetch, which ``begin`` has started. Return its result, or None to wait.

        Stops the fetch when a transfer that could start has waited for ``MixCosts.patience_s``, or
        when it has waited for ``lookup_s`` and no read has progressed for ``lookup_s``.
        """
        fetches = self._store.fetches
        fetched = fetches.poll(self._request_id)
        if fetched is not None:
            return fetched
        if queued:
            return None
        now = time.monotonic()
        self._ready_at = ready_at = now if self._ready_at is None else self._ready_at
        waited_s = now - ready_at
        if waited_s < self._patience_s and min(waited_s, fetches.idle_s(self._request_id)) < self._lookup_s:
            return None
        fetches.stop(self._request_id)
        fetched = fetches.poll(self._request_id)
        assert fetched is not None, "the fetch was stopped"
        return fetched


class TransferredTokens:
    """Tokens ``[start_token, end_token)`` whose full-attention KV a transfer supplies.

    Created when the transfer starts.
    """

    def __init__(self, store: KVStore, start_token: int, end_token: int) -> None:
        self._plan = store.plan
        # First token whose objects are not stored yet.
        self._start_token = start_token
        self._end_token = end_token
        groups = self._plan.full_attention.groups
        per_token = sum(store.object_bytes([ObjectRef(0, each.index)]) / each.span_tokens for each in groups)
        # Estimated bytes of full attention.
        self._size_bytes = int(per_token * (end_token - start_token))
        # Start of the transfer, on `time.monotonic`; None after its success.
        self._asked_at: float | None = time.monotonic()

    def succeeded(self, costs: MixCosts) -> None:
        """Record the transfer's duration in ``costs``. Later calls do nothing."""
        if self._asked_at is not None:
            costs.transferred(self._size_bytes, time.monotonic() - self._asked_at)
            self._asked_at = None

    def take_objects(self, computed: int) -> list[ObjectRef]:
        """Take the next objects of these tokens, to store in a step that begins at ``computed``.

        Returns objects of at most one chunk, to keep the step short, and only of full attention: a
        transfer sends windows and states only for the prompt's end.
        """
        if computed < self._end_token:
            # The transfer failed and this engine computes the tokens.
            self._start_token = self._end_token
        if self._start_token >= self._end_token:
            return []
        start, stop = self._start_token, min(self._end_token, self._start_token + self._plan.chunk_tokens)
        self._start_token = stop
        full = {spans.index for spans in self._plan.groups if spans.group.kind is GroupKind.FULL}
        return [ref for ref in completed_objects(self._plan, start, stop) if ref.group in full]
