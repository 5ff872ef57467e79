"""State of one request on the scheduler side of the KV store, and the names of its objects."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connectors.errors import PlanError
from connectors.planning.blocks import first_needed_token
from connectors.planning.layout import WINDOWED, GroupKind
from connectors.store.fetch import Fetch
from connectors.store.keys.names import ObjectName, PrefixChain
from connectors.store.planning.prefix import ObjectRef, completed_objects
from connectors.store.service import KVStore

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Transferred:
    """Tokens ``[start_token, end_token)`` whose full-attention KV a transfer supplies; windows and
    states only at the prompt's end (``docs/decisions/0050``).
    """

    def __init__(self, store: KVStore, start_token: int, end_token: int) -> None:
        self._store = store
        # First token whose objects are not stored yet.
        self._start_token = start_token
        self._end_token = end_token
        self._failed = False
        chunk_bytes = sum(store.sizes[each.index] for each in store.plan.full_attention.groups)
        self._size_bytes = chunk_bytes * (end_token - start_token) // store.plan.chunk_tokens
        # Start of the transfer; None after its success.
        self._asked_at: float | None = time.monotonic()

    def succeeded(self) -> None:
        if self._asked_at is not None:
            self._store.costs.transferred(self._size_bytes, time.monotonic() - self._asked_at)
            self._asked_at = None

    def take_objects(self, computed: int) -> list[ObjectRef]:
        """Take full-attention objects of at most one chunk, to keep the step short.

        ``computed``  token at which the step begins
        """
        if computed < self._end_token:
            # The transfer failed and this engine computes the tokens.
            self._start_token, self._failed = self._end_token, True
        if self._start_token >= self._end_token:
            return []
        plan, start = self._store.plan, self._start_token
        self._start_token = min(self._end_token, start + plan.chunk_tokens)
        completed = completed_objects(plan, start, self._start_token)
        return [ref for ref in completed if plan.groups[ref.group].group.kind is GroupKind.FULL]

    def has_tokens_of(self, ref: ObjectRef) -> bool:
        """Return whether the engine has all tokens of an object that ends after the transfer, which
        does not send tokens of a window's first block that attention at its end does not read. Call
        after ``take_objects``.
        """
        stored = self._store.plan.groups[ref.group]
        if self._failed or stored.group.kind not in WINDOWED:
            return True
        return ref.end_token - stored.kept_tokens >= first_needed_token(stored.group, self._end_token)


@dataclass(slots=True, eq=False)
class StoreRequest:
    """``present``  objects that a tier had at the request's last fetch; not stored again
    ``tier``     ``Fetch.tier`` of the last load that was ordered
    ``void``     whether its KV must not be stored
    """

    request: Request
    chain: PrefixChain
    fetch: Fetch | None = None
    present: frozenset[ObjectRef] = frozenset()
    tier: str = ""
    transferred: Transferred | None = None
    void: bool = False

    def end_fetch(self) -> None:
        if self.fetch is not None:
            self.fetch.close()
            self.fetch = None

    def names(self, refs: Iterable[ObjectRef]) -> dict[ObjectRef, ObjectName]:
        """Return the names of ``refs`` that end within the request's known tokens."""
        request, chain = self.request, self.chain
        try:
            chain.extend(request.all_token_ids[chain.tokens :])
        except PlanError:
            # A negative id is a placeholder for a token that has not been sampled yet.
            return {}
        return {ref: chain.name(ref) for ref in refs if ref.end_token <= chain.tokens}
