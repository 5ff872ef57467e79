"""Which engine holds how much of a prompt, as far as a router can know that has sent it there.

An approximate tree in bounded memory. Every node is the hash of a prefix, so that a set of hashes for each engine is
the tree. The oldest are forgotten first, of one prompt its end before its beginning, as vLLM does with its blocks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import xxhash

from actors.policy.prompts import PIECE_BYTES, Passage

ENDS_KEPT = 8
"""Ends of prompts that are remembered after one piece: conversations that share a system prompt differ only there."""


@dataclass(frozen=True)
class Held:
    """The beginning of a passage that an engine holds: `data_bytes` of it, then an answer of `answer_tokens`."""

    data_bytes: int = 0
    answer_tokens: int = 0


@dataclass(frozen=True)
class _End:
    """A prompt that ended within a piece, and how long its answer was."""

    tail_bytes: int
    digest: int
    answer_tokens: int


class _Tree:
    """What one engine holds. The least lately used is first; a piece's value are the prompts that ended after it."""

    def __init__(self) -> None:
        self.pieces: OrderedDict[int, tuple[_End, ...]] = OrderedDict()

    def held(self, passage: Passage) -> Held:
        pieces = self.pieces
        count = len(list(takewhile(pieces.__contains__, passage.pieces)))
        at = count * PIECE_BYTES
        before = passage.pieces[count - 1] if count else passage.seed
        found = Held(at)
        for end in pieces.get(before, ()):
            tail = passage.data[at : at + end.tail_bytes]
            longer = at + end.tail_bytes >= found.data_bytes
            # The answer is in the prompt only if something follows.
            if longer and len(passage.data) > at + end.tail_bytes and _digest(tail, before) == end.digest:
                found = Held(at + end.tail_bytes, end.answer_tokens)
        return found

    def add(self, passage: Passage, most: int) -> tuple[int, ...]:
        known = [piece for piece in passage.pieces if piece in self.pieces]
        new = tuple(piece for piece in passage.pieces if piece not in self.pieces)
        self.pieces.update((piece, ()) for piece in reversed(new))
        deque(map(self.pieces.move_to_end, reversed(known)), maxlen=0)  # thousands of pieces for a long prompt
        while len(self.pieces) > most:
            self.pieces.popitem(last=False)
        return new

    def add_end(self, passage: Passage, answer_tokens: int) -> None:
        before = passage.pieces[-1] if passage.pieces else passage.seed
        if passage.pieces and before not in self.pieces:
            return  # forgotten meanwhile
        tail = passage.tail
        end = _End(len(tail), _digest(tail, before), answer_tokens)
        others = [one for one in self.pieces.get(before, ()) if (one.tail_bytes, one.digest) != (len(tail), end.digest)]
        self.pieces[before] = (*others[-(ENDS_KEPT - 1) :], end)


class Prefixes:
    """What each engine holds, each at most `most_pieces`."""

    def __init__(self, most_pieces: int) -> None:
        self.most_pieces = most_pieces
        self._trees: dict[str, _Tree] = {}

    def held(self, engine: str, passage: Passage) -> Held:
        """The longest prefix of `passage` that `engine` is known to hold."""
        tree = self._trees.get(engine)
        return tree.held(passage) if tree else Held()

    def snapshot(self) -> dict[str, frozenset[int]]:
        """Return the pieces that each engine holds; a copy."""
        return {engine: frozenset(tree.pieces) for engine, tree in self._trees.items()}

    def add(self, engine: str, passage: Passage) -> tuple[int, ...]:
        """`engine` is to compute or to receive all of `passage`; returns the pieces that it did not hold."""
        return self._trees.setdefault(engine, _Tree()).add(passage, self.most_pieces)

    def drop(self, engine: str, pieces: Iterable[int]) -> None:
        """`engine` has not got these after all. What others have had of it since is forgotten, too."""
        if engine in self._trees:
            for piece in pieces:
                self._trees[engine].pieces.pop(piece, None)

    def add_answer(self, engine: str, passage: Passage, tokens: int) -> None:
        """`engine` has gone on from `passage` with `tokens` more, which a longer prompt will show."""
        if engine in self._trees:
            self._trees[engine].add_end(passage, tokens)

    def keep_only(self, engines: set[str]) -> None:
        """Forget engines that are gone."""
        for engine in self._trees.keys() - engines:
            del self._trees[engine]

    def size(self) -> int:
        """Pieces remembered, of all engines."""
        return sum(len(tree.pieces) for tree in self._trees.values())


def _digest(tail: bytes, before: int) -> int:
    return xxhash.xxh3_64_intdigest(tail, before)
