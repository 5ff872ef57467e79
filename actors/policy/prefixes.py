"""Prefixes of prompts in each engine's cache and in each KV store, estimated from this router's own
requests.

The classes call the holder of a prefix an engine; in `stores.py`, each holder is a KV store.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from actors.policy.prompts import PIECE_BYTES, Passage

ENDS_KEPT = 8
"""Maximum number of prompt ends stored after one piece.

Conversations with one system prompt may share all whole pieces and differ only in their ends.
"""


class Held(NamedTuple):
    """The prefix of a passage in an engine's cache.

    ``data_bytes``     number of bytes of the passage
    ``answer_tokens``  number of tokens of an earlier answer that follows these bytes
    """

    data_bytes: int = 0
    answer_tokens: int = 0


NOTHING = Held()


@dataclass(frozen=True)
class _End:
    """The end of a prompt that was answered.

    ``tail_bytes``     number of bytes after the prompt's last whole piece
    ``digest``         hash of these bytes
    ``answer_tokens``  number of tokens of the answer
    """

    tail_bytes: int
    digest: int
    answer_tokens: int


class _Tree:
    """Prefixes in one engine's cache, least recently used first: piece -> prompt ends after it."""

    def __init__(self) -> None:
        self.pieces: OrderedDict[int, tuple[_End, ...]] = OrderedDict()

    def held_pieces(self, passage: Passage) -> int:
        """Return the number of the passage's first pieces that are cached."""
        pieces, wanted = self.pieces, passage.pieces
        if not wanted or wanted[0] not in pieces:
            return 0
        if wanted[-1] in pieces:
            return len(wanted)
        # An engine that has cached a piece has cached those before it, so bisection finds the end
        # in a long prompt. `drop` may have removed some of these too early.
        return bisect_left(wanted, True, 1, key=lambda piece: piece not in pieces)

    def add(self, passage: Passage, most: int) -> tuple[int, ...]:
        known = [piece for piece in passage.pieces if piece in self.pieces]
        new = tuple(piece for piece in passage.pieces if piece not in self.pieces)
        self.pieces.update((piece, ()) for piece in reversed(new))
        deque(map(self.pieces.move_to_end, reversed(known)), maxlen=0)  # a long prompt has thousands of pieces
        while len(self.pieces) > most:
            self.pieces.popitem(last=False)
        return new

    def add_end(self, passage: Passage, answer_tokens: int) -> None:
        before = passage.pieces[-1] if passage.pieces else passage.seed
        if passage.pieces and before not in self.pieces:
            return  # evicted meanwhile
        tail = passage.tail
        end = _End(len(tail), _digest(tail, before), answer_tokens)
        others = [one for one in self.pieces.get(before, ()) if (one.tail_bytes, one.digest) != (len(tail), end.digest)]
        self.pieces[before] = (*others[-(ENDS_KEPT - 1) :], end)


class Prefixes:
    """Prompt prefixes that each engine is assumed to have cached, in pieces of PIECE_BYTES bytes.

    `add` removes the least recently used pieces of the engine beyond `most_pieces`.
    """

    def __init__(self, most_pieces: int) -> None:
        self.most_pieces = most_pieces
        self._trees: dict[str, _Tree] = {}

    def held(self, engine: str, passage: Passage) -> Held:
        """Return the longest prefix of `passage` that `engine` is assumed to have cached."""
        return self.held_by((engine,), passage)[0]

    def held_by(self, engines: Iterable[str], passage: Passage) -> list[Held]:
        """Return the longest prefix of `passage` that each engine is assumed to have cached."""
        found, size = [], len(passage.data)
        # By number of cached whole pieces, which is equal for most engines: their prefix, and the
        # last piece or the seed.
        whole = {0: (NOTHING, passage.seed)}
        for engine in engines:
            if (tree := self._trees.get(engine)) is None:
                found.append(NOTHING)
                continue
            count = tree.held_pieces(passage)
            if (known := whole.get(count)) is None:
                known = whole[count] = Held(count * PIECE_BYTES), passage.pieces[count - 1]
            held, before = known
            at = held.data_bytes
            for end in tree.pieces.get(before, ()):
                # An earlier prompt may have ended within the next piece. Its answer counts only
                # if this prompt has more bytes.
                after = at + end.tail_bytes
                if held.data_bytes <= after < size and _digest(passage.data[at:after], before) == end.digest:
                    held = Held(after, end.answer_tokens)
            found.append(held)
        return found

    def snapshot(self) -> dict[str, frozenset[int]]:
        """Return a copy of the pieces that each engine is assumed to have cached."""
        return {engine: frozenset(tree.pieces) for engine, tree in self._trees.items()}

    def add(self, engine: str, passage: Passage, most_pieces: int | None = None) -> tuple[int, ...]:
        """Record that `engine` will cache the pieces of `passage`; return the new ones.

        ``most_pieces``  limit for this engine; None: that of all engines
        """
        most = self.most_pieces if most_pieces is None else most_pieces
        return self._trees.setdefault(engine, _Tree()).add(passage, most)

    def drop(self, engine: str, pieces: Iterable[int]) -> None:
        """Remove pieces that `engine` did not compute or receive; other prompts may share them."""
        if engine in self._trees:
            for piece in pieces:
                self._trees[engine].pieces.pop(piece, None)

    def add_answer(self, engine: str, passage: Passage, tokens: int) -> None:
        """Record that `engine` has generated an answer of `tokens` tokens after `passage`."""
        if engine in self._trees:
            self._trees[engine].add_end(passage, tokens)

    def keep_only(self, engines: set[str]) -> None:
        """Remove all engines that are not in `engines`."""
        for engine in self._trees.keys() - engines:
            del self._trees[engine]

    def size(self) -> int:
        """Return the number of pieces of all engines."""
        return sum(len(tree.pieces) for tree in self._trees.values())


def _digest(tail: bytes, before: int) -> int:
    return xxhash.xxh3_64_intdigest(tail, before)
