"""Time that a store which hangs adds to a request: the wait from a fetch's start to its end.

    python -m benchmarks.store_hangs --requests 50 --out benchmarks/results/store_hangs.json

One store with a disk tier, without an engine. The disk hangs in lookups, in the first read, or in
the reads after the first object. Each request polls its fetch every millisecond, as an idle
engine's steps do. Half of the requests have a transfer, which would take a second; the others would
compute the prompt in a second. Nothing is known about the disk's rate. `next` is the wait of a
request that comes while the threads of the tier hang.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from connectors.planning.layout import Group, GroupKind, LayerPages
from connectors.store.fetch import Fetch
from connectors.store.keys.names import PrefixChain
from connectors.store.load_costs import LoadCosts
from connectors.store.planning.prefix import ObjectRef, possible_objects
from connectors.store.planning.spans import StorePlan, plan_store
from connectors.store.service import KVStore
from connectors.store.settings import StoreSettings
from connectors.store.tiers.files import Files
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.objects import ObjectName
from connectors.store.tiers.open_folder import OpenFolder
from connectors.store.tiers.staging import Staging

CHUNK_TOKENS = 128
OBJECT_BYTES = 4 << 20
PROMPT_TOKENS = 8 * CHUNK_TOKENS
SPACE = bytes(16)
FULL = Group(0, GroupKind.FULL, 16, None, (LayerPages("layers.0", 0, 128, 1, 1, 128, 16, 8, 8, "rows"),))


class HangingFiles(Files):
    """Files whose calls of one kind hang after ``hang``, reads only after the first
    ``reads_first``.
    """

    def __init__(self, call: str, reads_first: int = 0) -> None:
        self._call, self._reads_first = call, reads_first
        self._healthy = threading.Event()
        self._reads = 0
        self.heal()

    def hang(self) -> None:
        self._reads = 0
        self._healthy.clear()

    def heal(self) -> None:
        self._healthy.set()

    def head(self, folder: OpenFolder, name: str) -> tuple[bytes, os.stat_result]:
        if self._call == "head":
            self._healthy.wait()
        return super().head(folder, name)

    def read(
        self, folder: OpenFolder, name: str, payload: memoryview, piece_read: Callable[[memoryview], None]
    ) -> tuple[bytes, os.stat_result, int]:
        self._reads += 1
        if self._call == "read" and self._reads > self._reads_first:
            self._healthy.wait()
        return super().read(folder, name, payload, piece_read)


def names_of(plan: StorePlan, seed: int) -> dict[ObjectRef, ObjectName]:
    chain = PrefixChain(SPACE, plan.spans)
    chain.extend([(seed + position) % 50_000 for position in range(PROMPT_TOKENS)])
    refs = possible_objects(plan, 0, PROMPT_TOKENS)
    return {ref: ObjectName(SPACE, chain.key(ref), ref.group) for ref in refs}


def wait_s(store: KVStore, names: dict[ObjectRef, ObjectName], number: int) -> tuple[float, int]:
    """Return a request's wait in seconds and the tokens that it loads."""
    store.costs = LoadCosts()
    store.costs.computed(PROMPT_TOKENS, PROMPT_TOKENS / 2, 1.0)
    store.costs.transferred(OBJECT_BYTES * PROMPT_TOKENS // CHUNK_TOKENS, 1.0)
    began = time.monotonic()
    fetch = Fetch(store, names, 0, PROMPT_TOKENS, beside_transfer=bool(number % 2))
    while not fetch.poll():
        time.sleep(0.001)
    waited = time.monotonic() - began
    fetch.close()
    return waited, fetch.end_token


def measure(root: Path, files: HangingFiles, requests: int) -> dict[str, object]:
    plan = plan_store([FULL], CHUNK_TOKENS, 4096)
    tier = FolderTier(root / "disk", 4 << 30, durable=False, files=files)
    staging = Staging(512 << 20)
    store = KVStore(plan, SPACE, {0: OBJECT_BYTES}, [tier], staging, StoreSettings())
    names = names_of(plan, 0)
    for ref, name in names.items():
        tier.write(name, memoryview(bytes([ref.end_token % 251]) * OBJECT_BYTES), time.monotonic() + 30)
    healthy = [wait_s(store, names, number) for number in range(requests)]
    hanging, following = [], []
    for number in range(requests):
        files.hang()
        hanging.append(wait_s(store, names, number))
        following.append(wait_s(store, names, number))
        files.heal()
        while wait_s(store, names, number)[1] < PROMPT_TOKENS:
            continue
    store.close()

    def figures(waits: list[tuple[float, int]]) -> dict[str, float]:
        seconds = sorted(wait for wait, _ in waits)
        return {
            "median_ms": round(1e3 * seconds[len(seconds) // 2], 1),
            "max_ms": round(1e3 * seconds[-1], 1),
            "tokens": sum(tokens for _, tokens in waits) / len(waits),
        }

    return {"healthy": figures(healthy), "hangs": figures(hanging), "next": figures(following)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = {
        "lookup": HangingFiles("head"),
        "first read": HangingFiles("read"),
        "later reads": HangingFiles("read", reads_first=1),
    }
    results = {}
    for case, files in cases.items():
        with tempfile.TemporaryDirectory() as root:
            results[case] = measure(Path(root), files, options.requests)
        print(case, results[case], flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
