"""Prefixes of prompts in caches, estimated from this router's own requests.

A cache is an engine's prefix cache or a KV store, named by the id of either. A store keeps prompts
beyond evictions and restarts, for all its engines (docs/decisions/0058).
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import xxhash

from actors.policy.prompts import PIECE_BYTES, Passage, Prompt
from configs.settings.router import RoutingSettings

ENDS_KEPT = 8
"""Number of prompt ends after one piece: conversations may differ only in their ends."""


class Held(NamedTuple):
    """The prefix of a passage in a cache."""

    data_bytes: int = 0
    answer_tokens: int = 0  # of an earlier answer that follows these bytes


NOTHING = Held()


class _End(NamedTuple):
    """The end of a prompt that was answered."""

    tail_bytes: int  # after the prompt's last whole piece
    digest: int  # of these bytes
    answer_tokens: int


_Pieces = OrderedDict[int, tuple[_End, ...]]
"""Prefixes in one cache, least recently used first: prompt ends by the piece before them."""


class Prefixes:
    """Prompt prefixes that each cache is assumed to have: its `most_pieces` latest pieces."""

    def __init__(self, most_pieces: int) -> None:
        self.most_pieces = most_pieces
        self._caches: dict[str, _Pieces] = {}

    def held(self, caches: Iterable[str], passage: Passage) -> list[Held]:
        """Return the longest prefix of `passage` that each cache is assumed to have."""
        found, size = [], len(passage.data)
        # By number of cached whole pieces, which is equal for most caches: their prefix, and the
        # last piece or the seed.
        whole = {0: (NOTHING, passage.seed)}
        for cache in caches:
            if (pieces := self._caches.get(cache)) is None:
                found.append(NOTHING)
                continue
            count = _held_pieces(pieces, passage.pieces)
            if (known := whole.get(count)) is None:
                known = whole[count] = Held(count * PIECE_BYTES), passage.pieces[count - 1]
            held, before = known
            at = held.data_bytes
            for end in pieces.get(before, ()):
                # An earlier prompt may have ended within the next piece. Its answer counts only
                # if this prompt has more bytes.
                after = at + end.tail_bytes
                if held.data_bytes <= after < size and _digest(passage.data[at:after], before) == end.digest:
                    held = Held(after, end.answer_tokens)
            found.append(held)
        return found

    def add(self, cache: str, passage: Passage, most_pieces: int | None = None) -> tuple[int, ...]:
        """Record that `cache` will have the pieces of `passage`; return the new ones."""
        pieces = self._caches.setdefault(cache, OrderedDict())
        known = [piece for piece in passage.pieces if piece in pieces]
        new = tuple(piece for piece in passage.pieces if piece not in pieces)
        pieces.update((piece, ()) for piece in reversed(new))
        deque(map(pieces.move_to_end, reversed(known)), maxlen=0)  # a long prompt has thousands of pieces
        most = self.most_pieces if most_pieces is None else most_pieces
        while len(pieces) > most:
            pieces.popitem(last=False)
        return new

    def drop(self, cache: str, pieces: Iterable[int]) -> None:
        """Remove pieces that `cache` did not receive; other prompts may share them."""
        for piece in pieces if cache in self._caches else ():
            self._caches[cache].pop(piece, None)

    def add_answer(self, cache: str, passage: Passage, tokens: int) -> None:
        pieces, before = self._caches.get(cache), passage.pieces[-1] if passage.pieces else passage.seed
        if pieces is None or (passage.pieces and before not in pieces):
            return  # evicted meanwhile
        size, digest = len(passage.tail), _digest(passage.tail, before)
        others = [end for end in pieces.get(before, ()) if end[:2] != (size, digest)]
        pieces[before] = (*others[-(ENDS_KEPT - 1) :], _End(size, digest, tokens))

    def keep_only(self, caches: set[str]) -> None:
        for cache in self._caches.keys() - caches:
            del self._caches[cache]


def _held_pieces(pieces: _Pieces, wanted: tuple[int, ...]) -> int:
    if not wanted or wanted[0] not in pieces:
        return 0
    if wanted[-1] in pieces:
        return len(wanted)
    # A cache that has a piece has those before it, so bisection finds the end in a long prompt.
    # `drop` may have removed some of these too early.
    return bisect_left(wanted, True, 1, key=lambda piece: piece not in pieces)


def _digest(tail: bytes, before: int) -> int:
    return xxhash.xxh3_64_intdigest(tail, before)


STORES_KEPT = 64
"""Number of KV stores whose prefixes are kept: those of running engines and the latest others."""


class EngineStore(NamedTuple):
    """The KV store of an engine, as the engine announces it."""

    id: str  # equal for engines that load each other's objects
    tokens: int  # whose KV fits into the store
    chunk_tokens: int  # of one object; the store loads multiples of it


class Stores:
    """Prompt prefixes that each KV store is assumed to have, and the store of each engine."""

    def __init__(self, settings: RoutingSettings) -> None:
        self.prefixes = Prefixes(0)
        self.by_engine: Mapping[str, EngineStore] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self.reconfigure(settings)

    def reconfigure(self, settings: RoutingSettings) -> None:
        self._most_tokens = settings.prefix_tokens_per_store
        self._bytes_per_token = settings.assumed_bytes_per_token

    def announce(self, stores: Mapping[str, EngineStore]) -> None:
        """Replace the stores of all running engines, and keep the prefixes of earlier ones.

        An engine that restarts then finds those of its predecessor.
        """
        if stores == self.by_engine:
            return
        self.by_engine = dict(stores)
        ids = {store.id for store in stores.values()}
        for store in sorted(ids):
            self._seen[store] = None
            self._seen.move_to_end(store)
        while len(self._seen) > max(STORES_KEPT, len(ids)):
            self._seen.popitem(last=False)
        self.prefixes.keep_only(set(self._seen))

    def add(self, engine: str, prompt: Prompt) -> None:
        """Record that `engine` has the KV of `prompt`, which its store therefore receives."""
        if (store := self.by_engine.get(engine)) is not None:
            most_tokens = min(store.tokens, self._most_tokens)
            most_pieces = int(most_tokens * self._bytes_per_token / PIECE_BYTES)
            for passage in prompt.passages:
                self.prefixes.add(store.id, passage, most_pieces)

    def add_answer(self, engine: str, passage: Passage, tokens: int) -> None:
        if (store := self.by_engine.get(engine)) is not None:
            self.prefixes.add_answer(store.id, passage, tokens)
