"""State of one request on the scheduler side of the KV store, and the names of its objects.

Names depend on all tokens up to an object's end: those of the prompt, then of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connectors.errors import PlanError
from connectors.store.fetches import Fetched
from connectors.store.keys.names import PrefixChain
from connectors.store.planning.prefix import ObjectRef
from connectors.store.tiers.objects import ObjectName
from connectors.vllm_hma.kv_store.beside_transfer import TransferredTokens
from connectors.vllm_hma.kv_store.bounded_fetch import BoundedFetch

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class StoreRequest:
    """State of one request.

    ``chain``        digests of its prefixes
    ``fetched``      result of its fetch, until its load is ordered or the fetch is discarded
    ``present``      objects that a tier had at the request's last fetch; not stored again
    ``tier``         ``Fetched.tier`` of the last fetch whose load was ordered; empty before
    ``fetch``        its fetch, or the last one whose load is not ordered; None without one
    ``transferred``  tokens that its last transfer supplies; None before a transfer
    ``filling``      objects whose slots ranks are filling, by offset
    ``ended``        whether vLLM has finished the request
    ``void``         whether its KV must not be stored
    """

    request: Request
    chain: PrefixChain
    fetched: Fetched | None = None
    present: frozenset[ObjectRef] = frozenset()
    tier: str = ""
    fetch: BoundedFetch | None = None
    transferred: TransferredTokens | None = None
    filling: dict[int, ObjectRef] = field(default_factory=dict)
    ended: bool = False
    void: bool = False

    def names(self, space: bytes, refs: Iterable[ObjectRef]) -> dict[ObjectRef, ObjectName]:
        """Return the names of those of ``refs`` that end within the request's known tokens.

        The last tokens of an answer may not be known yet. Empty while a token id is a negative
        placeholder for a token that has not been sampled.

        ``space``  namespace of the objects
        """
        request, chain = self.request, self.chain
        try:
            chain.extend(request.all_token_ids[chain.tokens :])
        except PlanError:
            # A negative id is a placeholder for a token that has not been sampled yet.
            return {}
        return {ref: ObjectName(space, chain.key(ref), ref.group) for ref in refs if ref.end_token <= chain.tokens}
