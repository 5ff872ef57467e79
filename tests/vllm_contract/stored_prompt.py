"""Store schedulers that share a folder with the objects of one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.v1.request import Request

from connectors.planning.layout import GroupKind
from connectors.protocol.agent_metadata import ModelIdentity
from connectors.store.keys.names import PrefixChain
from connectors.store.planning.prefix import ObjectRef, completed_objects
from connectors.store.settings import StoreSettings
from connectors.vllm_hma.kv_store.orders import RankCache, StoreReport
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from tests.planning.builders import Shape, make_engine
from tests.vllm_contract.workers import until

CHUNK = 16
PROMPT = list(range(70))
END = len(PROMPT) - 1
GROUPS = ((GroupKind.FULL, None, 1), (GroupKind.SLIDING, 16, 1))
SHAPE = Shape(2, "head_major", 8, 8, 40, 0, True, GROUPS, 8)
RANK = make_engine(SHAPE, 1)[0]
CACHE = RankCache(RANK.layout, ModelIdentity("weights", "float32", "float32", "test"))
FULL = [ObjectRef(end, 0) for end in (16, 32, 48, 64)]


class Host:
    """Store schedulers of engines that share a path, one after the other."""

    def __init__(self, path: Path) -> None:
        self.settings = StoreSettings(path=str(path), disk_gib=0.1, chunk_tokens=CHUNK, staging_mib=1, lookup_s=5.0)
        self.schedulers: list[StoreScheduler] = []

    def start(self, **settings: Any) -> StoreScheduler:
        scheduler = StoreScheduler(self.settings.model_copy(update=settings), 4096)
        scheduler.publish([CACHE])
        scheduler.take(StoreReport(attached=1))
        self.schedulers.append(scheduler)
        return scheduler

    def fill(self, end_token: int) -> None:
        scheduler = self.start()
        store = scheduler.store
        chain = PrefixChain(store.space, CHUNK, "", None, [])
        chain.extend(PROMPT)
        for ref in completed_objects(store.plan, 0, end_token):
            offset = store.reserve(ref)
            assert offset is not None
            store.commit(ref, chain.name(ref), offset)
        until(store.idle)


def store_worker(spoiled: SpoiledSteps) -> StoreWorker:
    """Return the store of one rank, which works on cache RANK."""
    made = StoreWorker(StoreSettings(path="/unused", chunk_tokens=CHUNK, staging_mib=1), 4096, spoiled)
    made.register(RANK.layout)
    return made


def new_request(scheduler: StoreScheduler, name: str = "r") -> Request:
    request = Request(name, PROMPT, SamplingParams(max_tokens=1), None)
    scheduler.new_request(request)
    return request


def tables(end_token: int = END) -> tuple[list[int], ...]:
    """Block tables as vLLM allocates them for a transfer: of the window, only the end."""
    blocks = -(-end_token // 8)
    return [*range(1, blocks + 1)], [0] * (blocks - 3) + [30, 31, 32]


def left(scheduler: StoreScheduler) -> int:
    until(scheduler.store.idle)
    return scheduler.store.staging.used_bytes


def reserve(scheduler: StoreScheduler, name: str, ref: ObjectRef) -> int:
    """Begin to store an object of a request, as a step that completes it does; return the copy."""
    known = scheduler._requests[name]  # noqa: SLF001
    blocks = [[*range(1, 10)], [*range(11, 20)]]
    return scheduler._begin(scheduler._reserve([ref], blocks), known)  # noqa: SLF001


def matched(scheduler: StoreScheduler, request: Request) -> int:
    """Return the tokens that the store reports to vLLM, after as many steps as it asks for."""
    found: list[int | None] = [None]

    def answered() -> bool:
        found[0] = scheduler.matched_tokens(request, 0)
        return found[0] is not None

    until(answered)
    return found[0] or 0
