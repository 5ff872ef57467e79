"""KV events of the store: what vLLM publishes for stored and removed chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from connectors.errors import ConfigurationError
from connectors.store.planning.prefix import ObjectRef
from connectors.store.settings import StoreSettings
from connectors.vllm_hma.kv_store.capacity import check_sizes
from connectors.vllm_hma.kv_store.orders import StoreReport
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.model.adapters import Adapter
from tests.store.test_service import until
from tests.vllm_contract.stored_prompt import CACHE, PROMPT


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[StoreScheduler]:
    settings = StoreSettings(path=str(tmp_path / "store"), disk_gib=0.1, chunk_tokens=16, staging_mib=1, lookup_s=5.0)
    made = StoreScheduler(settings, 4096, events=True)
    made.publish([CACHE])
    made.take(StoreReport(attached=1))
    yield made
    made.close()


def stored(scheduler: StoreScheduler, *refs: ObjectRef, **of_request: Any) -> list[KVCacheEvent]:
    """Store objects of the prompt as a request's steps do; return the events."""
    request = Request("r", PROMPT, SamplingParams(max_tokens=1), None, **of_request)
    scheduler.new_request(request)
    for ref in refs:
        offset = scheduler.filling.reserve(scheduler._requests["r"], ref)  # noqa: SLF001
        assert offset is not None
        scheduler.take(StoreReport(filled={offset: 1}))
    until(scheduler.store.idle)
    scheduler.finished(request)
    return scheduler.take_events()


def test_stored_chunks_with_tokens_and_parents(scheduler: StoreScheduler) -> None:
    events = stored(scheduler, ObjectRef(16, 0), ObjectRef(32, 0), ObjectRef(32, 1))
    assert all(isinstance(event, BlockStored) for event in events)
    first, second, window = sorted(events, key=lambda event: (event.group_idx, event.token_ids[0]))
    assert first.token_ids == PROMPT[:16]
    assert second.token_ids == PROMPT[16:32]
    assert first.parent_block_hash is None
    assert second.parent_block_hash == first.block_hashes[0]
    assert window.parent_block_hash is None, "a window does not continue another one"
    assert {(event.block_size, event.medium) for event in (first, second)} == {(16, "STORAGE")}
    assert scheduler.take_events() == []
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(second))
    assert decoded["block_hashes"] == second.block_hashes


def test_the_events_have_vllms_extra_keys(scheduler: StoreScheduler) -> None:
    """The adapter is in those of every block, the salt in those of the first one only."""
    lora = LoRARequest("adapter", 1, "/adapter")
    scheduler.take(StoreReport(adapters={Adapter(1, "/adapter"): "content"}))
    events = stored(scheduler, ObjectRef(16, 0), ObjectRef(32, 0), lora_request=lora, cache_salt="salt")
    assert {event.token_ids[0]: (event.lora_name, event.extra_keys) for event in events} == {
        PROMPT[0]: ("adapter", [("adapter", "salt")]),
        PROMPT[16]: ("adapter", [("adapter",)]),
    }


def test_a_removed_chunk(scheduler: StoreScheduler, tmp_path: Path) -> None:
    (event,) = stored(scheduler, ObjectRef(16, 0))
    assert isinstance(event, BlockStored)
    (path,) = (tmp_path / "store" / "objects").glob("*/*")
    path.write_bytes(b"damaged")
    request = Request("s", PROMPT, SamplingParams(max_tokens=1), None)
    scheduler.new_request(request)
    until(lambda: scheduler.matched_tokens(request, 0) is not None)
    assert scheduler.take_events() == [BlockRemoved(block_hashes=event.block_hashes, medium="STORAGE")]
    scheduler.finished(request)


@pytest.mark.parametrize(("name", "stored_objects"), [("img-1", 0), ("a" * 64, 1), ("adapter:" + "b" * 128, 1)])
def test_images_named_by_clients_are_neither_stored_nor_loaded(
    scheduler: StoreScheduler, tmp_path: Path, name: str, stored_objects: int
) -> None:
    """Another image may have the same name on another day."""
    image = MultiModalFeatureSpec(None, "image", name, PlaceholderRange(2, 4))
    request = Request("r", PROMPT, SamplingParams(max_tokens=1), None, mm_features=[image])
    scheduler.new_request(request)
    assert len(scheduler._requests) == stored_objects  # noqa: SLF001
    assert (scheduler.matched_tokens(request, 0) == 0) == (stored_objects == 0), "or the lookup has begun"
    scheduler.finished(request)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"staging_mib": 0}, "store.staging_mib: .* objects of one chunk have [0-9,]+ bytes.* at least 1"),
        ({"disk_gib": 1e-8}, "the objects of one chunk have [0-9,]+ bytes, more than each tier; increase disk_gib"),
    ],
)
def test_a_chunk_that_never_fits(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    """Every object would be dropped without a word."""
    settings = StoreSettings(path=str(tmp_path / "store"), disk_gib=0.1, chunk_tokens=16, staging_mib=1)
    made = StoreScheduler(settings.model_copy(update=changed), 4096)
    with pytest.raises(ConfigurationError, match=message):
        made.publish([CACHE])


@pytest.mark.parametrize(
    ("sizes", "staging_mib"),
    [([1 << 20], 1), ([1 << 19, 1 << 19], 2), ([349_525] * 3, 3)],
)
def test_stores_leave_half_of_staging_to_loads(sizes: list[int], staging_mib: int) -> None:
    """A step completes one object of each group; a single object may use all."""
    settings = StoreSettings(path="/disk", staging_mib=staging_mib)
    check_sizes(sizes, settings)
    with pytest.raises(ConfigurationError, match=rf"at least {staging_mib}, or"):
        check_sizes(sizes, settings.model_copy(update={"staging_mib": staging_mib - 1}))


def test_an_object_that_was_there_already_is_no_event(scheduler: StoreScheduler) -> None:
    assert len(stored(scheduler, ObjectRef(16, 0))) == 1
    assert stored(scheduler, ObjectRef(16, 0)) == []


def test_the_tail_of_a_prompt_is_evicted_first(tmp_path: Path) -> None:
    """Without its first chunk, a stored prompt would be of no use."""
    pages = 8 * 4096 / (1 << 30)
    scheduler = StoreScheduler(
        StoreSettings(path=str(tmp_path / "store"), disk_gib=pages, chunk_tokens=8), 4096, events=True
    )
    scheduler.publish([CACHE])
    prompt = stored(scheduler, *(ObjectRef(end, 0) for end in range(8, 65, 8)))
    tail = next(event for event in prompt if isinstance(event, BlockStored) and event.token_ids == PROMPT[56:64])
    _, removed = stored(scheduler, ObjectRef(64, 1))
    assert removed == BlockRemoved(block_hashes=tail.block_hashes, medium="STORAGE")
    scheduler.close()


def test_without_kv_events_nothing_is_kept(tmp_path: Path) -> None:
    scheduler = StoreScheduler(
        StoreSettings(path=str(tmp_path / "store"), disk_gib=0.1, chunk_tokens=16, staging_mib=1, lookup_s=5.0), 4096
    )
    scheduler.publish([CACHE])
    assert stored(scheduler, ObjectRef(16, 0)) == []
    scheduler.close()
