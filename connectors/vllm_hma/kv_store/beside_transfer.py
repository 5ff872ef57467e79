"""Measure a transfer beside a stored prefix, and choose which transferred KV to store.

The store loads full attention of a prompt's first tokens. The transfer supplies full attention of
the tokens after them, and windows and states at the prompt's end (``docs/decisions/0050``).
"""

from __future__ import annotations

import time

from connectors.planning.blocks import first_needed_token
from connectors.planning.layout import WINDOWED, GroupKind
from connectors.store.load_costs import LoadCosts
from connectors.store.planning.prefix import ObjectRef, completed_objects
from connectors.store.service import KVStore


class TransferredTokens:
    """Tokens ``[start_token, end_token)`` whose full-attention KV a transfer supplies.

    Created when the transfer starts.
    """

    def __init__(self, store: KVStore, start_token: int, end_token: int) -> None:
        self._plan = store.plan
        # First token whose objects are not stored yet.
        self._start_token = start_token
        self._end_token = end_token
        self._failed = False
        groups = self._plan.full_attention.groups
        per_token = sum(store.object_bytes([ObjectRef(0, each.index)]) / each.span_tokens for each in groups)
        # Estimated bytes of full attention.
        self._size_bytes = int(per_token * (end_token - start_token))
        # Start of the transfer, on `time.monotonic`; None after its success.
        self._asked_at: float | None = time.monotonic()

    def succeeded(self, costs: LoadCosts) -> None:
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
            self._start_token, self._failed = self._end_token, True
        if self._start_token >= self._end_token:
            return []
        start, stop = self._start_token, min(self._end_token, self._start_token + self._plan.chunk_tokens)
        self._start_token = stop
        full = {spans.index for spans in self._plan.groups if spans.group.kind is GroupKind.FULL}
        return [ref for ref in completed_objects(self._plan, start, stop) if ref.group in full]

    def has_tokens_of(self, ref: ObjectRef) -> bool:
        """Return whether the engine has all tokens of an object that ends after the transfer.

        A transfer sends windows only from the first token that attention at its end reads. It does
        not send earlier tokens of the same block, so an object that keeps them would be incomplete.
        Call after ``take_objects``.
        """
        spans = self._plan.groups[ref.group]
        if self._failed or spans.group.kind not in WINDOWED:
            return True
        return ref.end_token - spans.kept_tokens >= first_needed_token(spans.group, self._end_token)
