"""Engines share KV of a LoRA adapter only if they have loaded the same content, whatever its files
are now.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from app.demo.paths import MODEL_DIR
from connectors.store.planning.prefix import ObjectRef
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.kv_store.orders import StoreReport
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from connectors.vllm_hma.metrics import TandemStats
from connectors.vllm_hma.model import adapters
from connectors.vllm_hma.model.adapters import UNKNOWN, Adapter, AdapterChanges, AdapterLoads, adapter_loads
from connectors.vllm_hma.model.weights import digest_file
from connectors.vllm_hma.orders import Chunk, Orders
from connectors.vllm_hma.upstream.vllm_adapter_loads import watch_adapter_loads
from connectors.vllm_hma.worker_side.adapter_claims import AdapterClaims
from connectors.vllm_hma.worker_side.worker import WorkerConnector
from testing.adapters import ADAPTED, RANK, lora_adapter
from tests.vllm_contract import scheduler_sides as sides
from tests.vllm_contract.caches import cache_config, full, vllm_config
from tests.vllm_contract.stored_prompt import PROMPT, Host, matched, reserve
from tests.vllm_contract.workers import EXPECT, FAILED, SENT, Worker, receive, results, until

WEIGHTS = "adapter_model.safetensors"


class Engine:
    """The adapters of one engine: vLLM's own loading of files, and what the connector records."""

    def __init__(self) -> None:
        self.loads = AdapterLoads()
        config = vllm_config.__wrapped__(enable_lora=True, max_lora_rank=RANK)
        self._manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), {})
        # The part that copies adapters into a model's layers.
        self._manager._adapter_manager = SimpleNamespace(  # noqa: SLF001
            supported_lora_modules=list(ADAPTED),
            packed_modules_mapping={},
            model=torch.nn.Module(),
            moe_ep_load_spec=None,
            _validate_moe_lora_format=lambda _: None,
            _validate_modules_to_save=lambda _: None,
            _validate_token_classification_lora=lambda _: None,
        )

    def load(self, path: Path | str, number: int = 1) -> str:
        watch_adapter_loads(self.loads.reading)
        loaded = self._manager._load_adapter(LoRARequest("name", number, str(path)))  # noqa: SLF001
        assert loaded.id == number
        return self.identity(path, number)

    def identity(self, path: Path | str, number: int = 1) -> str:
        return self.loads.identity(Adapter(number, str(path)))

    def claims(self) -> AdapterClaims:
        return AdapterClaims(self.loads)


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    """Leave vLLM as other tests of this process expect it."""
    yield
    adapter_loads()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return lora_adapter(tmp_path / "old", MODEL_DIR, 1)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return lora_adapter(tmp_path / "new", MODEL_DIR, 2)


def overwrite(folder: Path, other: Path) -> None:
    """Copy an adapter over another one, as an operator does."""
    for file in other.iterdir():
        shutil.copy(file, folder / f"{file.name}.part")
        (folder / f"{file.name}.part").replace(folder / file.name)


def test_an_adapter_is_its_content(tmp_path: Path, old: Path, new: Path) -> None:
    """Two hosts may have one adapter at two paths, and two adapters at one path: files may change
    after the load.
    """
    copy = Path(shutil.copytree(old, tmp_path / "copy"))
    here = Engine()
    first, same, another = (here.load(path, number) for number, path in enumerate((old, copy, new), 1))
    assert first == same == Engine().load(copy) != another
    settings = (copy / "adapter_config.json").read_text().replace(f'"lora_alpha": {RANK}', f'"lora_alpha": {RANK + 1}')
    (copy / "adapter_config.json").write_text(settings)
    changed = Engine().load(copy)
    overwrite(old, new)
    assert here.identity(old) == first != Engine().load(old) == another
    assert len({first, another, changed, UNKNOWN}) == 4


def test_a_path_with_two_contents_stays_unknown(tmp_path: Path, old: Path, new: Path) -> None:
    """vLLM's prefix cache names KV of both contents alike, also after the first one is back."""
    engine, first = Engine(), Path(shutil.copytree(old, tmp_path / "first"))
    engine.load(old)
    overwrite(old, new)
    assert (engine.load(old, 2), engine.identity(old)) == (UNKNOWN, UNKNOWN)
    overwrite(old, first)
    assert engine.load(old, 3) == UNKNOWN
    assert engine.load(new, 3) != UNKNOWN


def test_a_bounded_number_of_adapters_is_remembered(tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further ones are unknown, and make those unknown whose path or id they have."""
    monkeypatch.setattr(adapters, "ADAPTERS_KEPT", 3)
    engine = Engine()
    changes = AdapterChanges(engine.loads)
    paths = [Path(shutil.copytree(old, tmp_path / str(number))) for number in range(4)]
    for number, path in enumerate(paths, 1):
        engine.load(path, number)
    kept = [Adapter(number, str(path)) for number, path in enumerate(paths[:3], 1)]
    assert set(changes.take()) == set(engine.loads.identities) == set(kept)
    assert engine.identity(paths[3], 4) == UNKNOWN
    engine.load(paths[0], 5)
    engine.load(paths[3], 2)
    engine.load(paths[0], 1)
    engine.load(paths[1], 2)
    assert [engine.identity(path, number) == UNKNOWN for number, path in enumerate(paths, 1)] == [
        True,
        True,
        False,
        True,
    ]
    assert changes.take() == dict.fromkeys(kept[:2], UNKNOWN)


def test_another_path_under_the_same_id(old: Path, new: Path) -> None:
    """Requests for the first path that still run compute with the second one's weights."""
    engine = Engine()
    engine.load(old)
    assert engine.load(new) != UNKNOWN
    assert engine.identity(old) == UNKNOWN
    assert engine.identity(new, number=2) == UNKNOWN, "this id has not been loaded"
    loads = AdapterLoads()
    with loads.reading(LoRARequest("name", 1, str(old)), old):
        overwrite(old, new)
    assert loads.identities == {Adapter(1, str(old)): UNKNOWN}, "files that change while they are read"


def test_a_load_without_changes_reads_the_files_once(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a load in place, vLLM loads the adapter at every step."""
    read: list[Path] = []

    def counted(file: Path) -> str:
        read.append(file)
        return digest_file(file)

    monkeypatch.setattr("connectors.vllm_hma.model.adapters.digest_file", counted)
    engine = Engine()
    assert engine.load(old) == engine.load(old) != UNKNOWN
    assert len(read) == 2, "settings and weights"


def test_files_that_vllm_cannot_load(tmp_path: Path, old: Path) -> None:
    """vLLM reports the error to the client; the weights in memory stay the ones before."""
    engine = Engine()
    before = engine.load(old)
    with pytest.raises(LoRAAdapterNotFoundError, match=str(tmp_path / "missing")):
        engine.load(tmp_path / "missing", 2)
    (old / WEIGHTS).unlink()
    (old / WEIGHTS).symlink_to("gone")
    with pytest.raises(ValueError, match="contain tensors"):
        engine.load(old)
    assert engine.identity(old) == before


def test_both_requests_of_a_transfer_name_the_loaded_content(tmp_path: Path, old: Path, new: Path) -> None:
    """Two paths with one content match. The scheduler's thread does not touch the files, which may
    be gone: it would end, or stop, the engine.
    """
    copy = Path(shutil.copytree(old, tmp_path / "copy"))
    prefill, decode = Engine(), Engine()
    for engine, path in ((prefill, old), (decode, copy)):
        engine.load(path)
        engine.load(new, 2)
    for folder in (old, copy, new):
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to("gone")

    def digests(producer: LoRARequest | None, consumer: LoRARequest | None) -> tuple[str, str]:
        (expect,) = sides.start(sides.scheduler(), sides.request(sides.PRODUCE, lora=producer)).expects
        (ordered,) = sides.start(sides.scheduler(), sides.request(sides.CONSUME, lora=consumer)).receives
        claims = prefill.claims()
        found = claims.expect(expect).prompt_digest, decode.claims().receive(ordered).prompt_digest
        claims.finished(expect.request_id)
        assert len(claims) == 0
        return found

    same = digests(LoRARequest("name", 1, str(old)), LoRARequest("name", 1, str(copy)))
    assert same[0] == same[1]
    other = LoRARequest("other", 2, str(new))
    found = {*same, *digests(other, other), *digests(None, None)}
    assert len(found) == 3, "a digest for each adapter, and one without"
    strange = LoRARequest("strange", 3, str(old))
    assert len({*digests(strange, strange), *digests(strange, strange)}) == 4, "not loaded: equal to no other"


@pytest.mark.parametrize("streaming", ["chunk", "layer"])
@pytest.mark.parametrize("before", [True, False], ids=["V2", "V1"])
def test_prefill_does_not_send_kv_of_two_adapters(
    worker: Callable[..., Worker], old: Path, new: Path, before: bool, streaming: str
) -> None:
    """The adapter is loaded again, with other weights, when half of a prompt is computed.

    vLLM's V2 runner loads the adapters of a step before it calls the connector, V1 after that.
    """
    engine, producer, consumer = Engine(), worker("p", streaming=streaming), worker("c")
    producer.cache[:] = 0xEE
    engine.load(old)
    prefill = WorkerConnector(parse_config({}), "p", vllm_config(), cache_config((["f"], full())))
    prefill._runtime, prefill._adapters = producer.runtime, engine.claims()  # noqa: SLF001
    prefill._adapter_changes = AdapterChanges(engine.loads)  # noqa: SLF001
    adapter = Adapter(1, str(old))

    def step(load: bool, **orders: Any) -> None:
        if load and before:
            engine.load(old)
        prefill.before_forward(Orders(**orders))
        if load and not before:
            engine.load(old)
        prefill.layer_computed("layer")
        prefill.after_forward(Orders(**orders))

    step(False, expects=[replace(EXPECT, adapter=adapter)], chunks=[Chunk("q", ((1,),), 4)])
    assert (prefill.stats() or TandemStats()).data["adapters"] == {f"1 {old}": engine.identity(old)}
    consumer.step(receives=[engine.claims().receive(replace(receive(producer.address), adapter=adapter))])
    until(lambda: producer.runtime.counts()["live"] == 1)
    overwrite(old, new)
    step(True, chunks=[Chunk("q", ((2,),), 7, last=True)])
    step(False, finished=[SENT])
    assert results(consumer) == FAILED
    assert results(producer) == ({"q"}, set(), set())
    assert (consumer.cache[5] == 0).all(), "nothing of the second step was written"


def with_adapter(scheduler: StoreScheduler, name: str) -> Request:
    request = Request(name, PROMPT, SamplingParams(max_tokens=1), None, lora_request=LoRARequest("name", 1, "/a"))
    scheduler.new_request(request)
    return request


def filled(scheduler: StoreScheduler, name: str, end_token: int) -> Counter[int]:
    return Counter(reserve(scheduler, name, ObjectRef(end_token, group)) for group in (0, 1))


def store_prompt(scheduler: StoreScheduler, name: str) -> None:
    scheduler.take(StoreReport(copied=filled(scheduler, name, 16)))
    until(scheduler.store.idle)


def test_stored_kv_belongs_to_the_loaded_content(host: Host) -> None:
    """The store does not serve a request whose adapter no worker has reported yet. A missing folder
    does not matter to the scheduler.
    """
    adapter, first = Adapter(1, "/a"), host.start()
    early = with_adapter(first, "early")
    assert first.matched_tokens(early, 0) == 0
    first.finished(early)
    assert first.remembered == 0
    first.take(StoreReport(adapters={adapter: "old"}))
    request = with_adapter(first, "r")
    store_prompt(first, "r")
    first.finished(request)
    for identity, tokens in (("new", 0), ("old", 16)):
        later = host.start()
        later.take(StoreReport(adapters={adapter: identity}))
        assert matched(later, with_adapter(later, "r")) == tokens


def test_kv_of_a_replaced_adapter_is_neither_stored_nor_loaded(host: Host) -> None:
    """A request runs while its adapter is loaded again from changed files."""
    adapter, scheduler = Adapter(1, "/a"), host.start()
    scheduler.take(StoreReport(adapters={adapter: "old"}))
    running = with_adapter(scheduler, "running")
    store_prompt(scheduler, "running")
    waiting = with_adapter(scheduler, "waiting")
    assert matched(scheduler, waiting) == 16
    scheduler.take(StoreReport(copied=filled(scheduler, "running", 32), adapters={adapter: UNKNOWN}))
    until(scheduler.store.idle)
    assert scheduler.store.counts["store_problems", "dropped_store"] == 2
    assert scheduler.matched_tokens(waiting, 0) == 0
    assert scheduler.matched_tokens(with_adapter(scheduler, "next"), 0) == 0
    for request in (running, waiting):
        scheduler.finished(request)
    assert scheduler.remembered == 0
    assert scheduler.store.staging.used_bytes == 0


def test_workers_report_each_load_once(host: Host, old: Path, new: Path) -> None:
    engine, worker = Engine(), StoreWorker(host.settings, 4096, SpoiledSteps(1))
    worker._adapters = AdapterChanges(engine.loads)  # noqa: SLF001
    first, second = Adapter(1, str(old)), Adapter(1, str(new))
    assert worker.report() is None
    found = engine.load(old)
    assert [worker.report(), worker.report()] == [StoreReport(adapters={first: found}), None]
    found = engine.load(new)
    assert worker.report() == StoreReport(adapters={first: UNKNOWN, second: found})


def test_ranks_that_have_loaded_different_files() -> None:
    one, two = Adapter(1, "/a"), Adapter(2, "/b")
    report = StoreReport(adapters={one: "x", two: "y"}).aggregate(StoreReport(adapters={one: "x", two: "z"}))
    assert report.adapters == {one: "x", two: UNKNOWN}
