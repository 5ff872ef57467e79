"""Prefixes of prompts in each KV store, estimated from this router's own requests.

A store keeps prompts beyond evictions and restarts, for all its engines (docs/decisions/0058).
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from actors.policy.prefixes import Prefixes
from actors.policy.prompts import PIECE_BYTES, Passage, Prompt
from configs.settings.router import RoutingSettings

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
