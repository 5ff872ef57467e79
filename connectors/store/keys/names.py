"""Names of stored objects, by model (namespace), tokens (prefix) and KV cache group.

    namespace  weights and configuration, dtypes, vLLM release, ``chunk_tokens``, format and
               layout of objects
    prefix     namespace, all token ids from the first one, the adapter, the salt, and multimodal
               inputs at their offsets
    key        namespace, prefix up to the object's end, group

All three are BLAKE2b digests. They do not depend on Python's ``hash``, the TP size, block sizes or
the host.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from connectors.errors import PlanError
from connectors.planning.layout import EngineLayout
from connectors.protocol.agent_metadata import ModelIdentity
from connectors.store.planning.chunks import StorePlan
from connectors.store.planning.prefix import ObjectRef

# Version of names, files and object contents. Versions have different namespaces.
FORMAT = 2
NAMESPACE_BYTES = 16
KEY_BYTES = 32

# Separates the adapter, the salt and features from token ids, which are never negative.
_MARK = np.array([-1], "<i8").tobytes()


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Name of an object: ``key`` in the namespace ``space``.

    ``end_token``  number of tokens up to the object's end; orders evictions
    """

    space: bytes
    key: bytes
    end_token: int = 0

    @property
    def path(self) -> tuple[str, str]:
        return self.space.hex(), self.key.hex()


@dataclass(frozen=True, slots=True)
class Feature:
    """A multimodal input: vLLM's name of the content, and the index of its first token."""

    identifier: str
    offset: int


def namespace(model: ModelIdentity, plan: StorePlan, store: EngineLayout) -> bytes:
    """Return the namespace of a model's objects; ``store`` is the result of ``store_layout``."""
    groups = [
        {
            "kind": stored.group.kind.value,
            "window": stored.group.window_tokens,
            "kept": stored.kept_tokens,
            "layers": [
                [
                    pages.layer,
                    pages.address,
                    pages.total_heads,
                    pages.stripes,
                    pages.rows,
                    pages.row_bytes,
                    pages.packing,
                ]
                for pages in group.layers
            ],
        }
        for stored, group in zip(plan.stored, store.groups, strict=True)
    ]
    # Without KV of drafts, which the store does not keep.
    identity = {name: getattr(model, name) for name in ("dtype", "cache_dtype", "engine_version")}
    identity["weights"] = model.model
    described = {"format": FORMAT, "model": identity, "chunk": plan.chunk_tokens, "groups": groups}
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES, person=b"tandem-store").digest()


class PrefixChain:
    """Digests of one request's prefixes at each multiple of ``chunk_tokens``.

    A feature is part of all digests of prefixes that end after its offset.

    ``adapter``  identity of the LoRA adapter's content; empty without an adapter
    """

    def __init__(
        self,
        space: bytes,
        chunk_tokens: int,
        adapter: str = "",
        salt: str | None = None,
        features: Iterable[Feature] = (),
    ) -> None:
        self._space = space
        self._chunk_tokens = chunk_tokens
        self._features = sorted(features, key=lambda feature: (feature.offset, feature.identifier), reverse=True)
        self._hasher = hashlib.blake2b(digest_size=KEY_BYTES, person=b"tandem-prefix")
        self._hasher.update(space)
        self._add("adapter", adapter)
        # No salt and an empty salt must give different digests.
        self._add("salt", "" if salt is None else f"={salt}")
        self._digests: dict[int, bytes] = {}
        self.tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Raises PlanError, without a change, for a negative id or offset."""
        ids = np.asarray(token_ids, "<i8")
        if len(ids) and int(ids.min()) < 0:
            raise PlanError("token ids must not be negative")
        start, stop, chunk = self.tokens, self.tokens + len(ids), self._chunk_tokens
        ends = range((start // chunk + 1) * chunk, stop + 1, chunk)
        offsets = set()
        for feature in self._features:
            if feature.offset < start:
                raise PlanError(f"a multimodal input has offset {feature.offset}; offsets must not be negative")
            if feature.offset < stop:
                offsets.add(feature.offset)
        for stop_at in sorted({*ends, *offsets, stop}):
            self._hasher.update(ids[self.tokens - start : stop_at - start].tobytes())
            self.tokens = stop_at
            if stop_at in ends:
                self._digests[stop_at] = self._hasher.copy().digest()
            # After the digest: a prefix that ends at a feature's offset does not contain the
            # feature.
            while stop_at in offsets and self._features and self._features[-1].offset == stop_at:
                self._add("feature", self._features.pop().identifier)

    def name(self, ref: ObjectRef) -> ObjectName:
        whole = hashlib.blake2b(self._space, digest_size=KEY_BYTES, person=b"tandem-object")
        whole.update(self._digests[ref.end_token])
        whole.update(ref.group.to_bytes(4, "little"))
        return ObjectName(self._space, whole.digest(), ref.end_token)

    def _add(self, what: str, value: str) -> None:
        data = value.encode()
        self._hasher.update(_MARK + what.encode() + len(data).to_bytes(8, "little") + data)
