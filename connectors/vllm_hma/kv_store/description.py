"""Description of an engine's KV store for routers, which estimate the prompts in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from connectors.store.planning.spans import StorePlan
from connectors.store.tiers.folder import FolderTier

logger = logging.getLogger(__name__)


def describe_store(
    slowest: FolderTier, space: bytes, plan: StorePlan, sizes: Mapping[int, int]
) -> dict[str, Any] | None:
    """Return the fields of an ``EngineStore`` (``actors/policy/stores.py``).

    The slowest tier identifies the store: it is the largest, and outlives the others. With the
    namespace, engines of other weights that share the folder have another id. Returns None if the
    folder's id cannot be read or written; the store works without it.

    ``space``  namespace of the objects
    ``sizes``  payload bytes of one object, by index of its group
    """
    try:
        folder = slowest.id()
    except OSError as error:
        logger.warning(
            "Tandem: cannot read the id of the KV store in %s, so routers ignore the store: %r", slowest.path, error
        )
        return None
    token_bytes = sum(sizes[spans.index] / spans.span_tokens for spans in plan.groups if spans.stored)
    return {
        "id": f"{folder}-{space.hex()}",
        "tokens": int(slowest.budget_bytes / token_bytes),
        "chunk_tokens": plan.chunk_tokens,
    }
