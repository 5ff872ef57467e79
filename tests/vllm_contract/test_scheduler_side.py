"""The scheduler side without an engine: resets, queued requests, lost engines and images; and
queued requests between workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image
from vllm import SamplingParams
from vllm.config.multimodal import MMHasherAlgorithm, MultiModalConfig
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from connectors.errors import ConfigurationError
from connectors.protocol.actions import Due
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.model.media import check_media, named_by_content, reads_whole_images
from connectors.vllm_hma.orders import Finished, Orders, Queue, Release
from connectors.vllm_hma.plugin import register
from connectors.vllm_hma.reports import WorkerReport
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector
from testing.connector_state import snapshot
from tests.campaigns.schedules.scheduling import Engine
from tests.vllm_contract.caches import vllm_config
from tests.vllm_contract.scheduler_sides import (
    BLOCK,
    CONSUME,
    PRODUCE,
    PRODUCER,
    TOKENS,
    leave,
    orders,
    request,
    scheduler,
    start,
)
from tests.vllm_contract.workers import ARRIVED, EXPECT, SENT, WHOLE, Worker, receive, results, until


def produced(side: SchedulerConnector, name: str = "r", **request_: Any) -> str:
    (expect,) = start(side, request(PRODUCE | {"transfer_id": name}, name, **request_)).expects
    return expect.prompt_digest


def consumed(side: SchedulerConnector, **request_: Any) -> str:
    (order,) = start(side, request(CONSUME, **request_)).receives
    return order.prompt_digest


# ---- resets ------------------------------------------------------------------------------------


def test_later_transfers_are_refused_by_their_digest() -> None:
    """After ``reset_prefix_cache(reset_connector=True)``, the weights in memory may be others than
    those of the files: the engine shares no KV, also not with an engine that was reset, too.
    """
    before = consumed(scheduler())
    assert produced(scheduler()) == before
    prefill, decode = scheduler(), scheduler()
    for side in (prefill, decode):
        side.reset()
    found = [produced(prefill), consumed(decode)]
    prefill.reset()
    found.append(produced(prefill, "later"))
    assert len({before, *found}) == 4
    engine = Engine(1, 60, prefix_caching=True, asynchronous=False)
    try:
        before = produced(engine.connector.scheduler, "a")
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert produced(engine.connector.scheduler, "b") != before
    finally:
        engine.close()


def test_prompts_in_progress_are_not_sent() -> None:
    """vLLM may compute their rest, or all of them, with other weights. Complete KV is sent."""
    prefill = scheduler()
    complete, part = request(PRODUCE, "complete"), request(PRODUCE | {"transfer_id": "u"}, "part")
    for each in (complete, part):
        prefill.new_request(each)
    orders(prefill)
    complete.status, complete.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, TOKENS - 1
    assert prefill.productions.finished(complete) is not None
    assert orders(prefill).finished == [Finished("complete", True, "")]
    prefill.reset()
    (ended,) = orders(prefill).finished
    assert (ended.request_id, ended.held) == ("part", False)
    assert "reset" in ended.reason


# ---- queued requests ---------------------------------------------------------------------------


def consume(name: str, transfer: str = "t", **params: Any) -> Request:
    return request(CONSUME | {"transfer_id": transfer} | params, name, tokens=50)


def busy() -> SchedulerConnector:
    side = scheduler()
    start(side, consume("first", "first"))
    return side


def asked(side: SchedulerConnector, *requests: Request) -> list[int | None]:
    return [side.consumptions.matched_tokens(each, 0) for each in requests]


def test_a_queued_request_claims_nothing_until_it_is_due() -> None:
    """Another producer's request does not wait for it."""
    side, one, other = busy(), consume("d"), consume("e", "u", remote_engine_id="p2")
    for each in (one, other):
        side.new_request(each)
    assert orders(side) == Orders(queues=[Queue("d", "t", PRODUCER)])
    assert asked(side, one, other) == [None, 49]
    side.consumptions.due([Due("d", "another transfer's", None)])
    assert asked(side, one) == [None]
    side.consumptions.due([Due("d", "t", None)])
    assert (asked(side, one), side.consumptions.matched_tokens(one, 32)) == ([49], 17)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_request_whose_prompt_will_not_come_is_computed_here(cancelled: bool) -> None:
    """Only rank 0 waits in the queue. If it has cancelled the transfer at its partners, the other
    ranks do the same at theirs, which would hold the KV until the lease ends.
    """
    side, one = busy(), consume("d")
    side.new_request(one)
    orders(side)
    side.consumptions.due([Due("d", "t", "no message arrived", cancelled)])
    assert asked(side, one) == [0]
    side.consumptions.after_alloc(one, ([1, 2],), 0)
    assert orders(side) == Orders(releases=[Release("t", PRODUCER)] if cancelled else [])
    stats = side.stats()
    assert stats is not None
    # The 49 tokens are those of the request before it.
    assert stats.data["counts"] == {"prompt_tokens": {"transfer": 49}, "requests": {"recomputed": 1}}


@pytest.mark.parametrize("ends", ["holds all but the last token", "is aborted"])
def test_a_queued_request_that_needs_no_transfer_is_released(ends: str) -> None:
    side, one = busy(), consume("d")
    side.new_request(one)
    orders(side)
    if ends == "is aborted":
        leave(side, one)
    else:
        assert side.consumptions.matched_tokens(one, 49) == 0
        side.consumptions.after_alloc(one, ([1, 2],), 0)
    assert orders(side) == Orders(releases=[Release("t", PRODUCER)])
    side.consumptions.due([Due("d", "t", None)])
    found = snapshot(side)
    assert (found.queued, found.consumptions, found.receptions) == (frozenset(), frozenset(), {"first"})


def test_legs_that_come_one_after_the_other_wait_for_no_start() -> None:
    """A public proxy passes prefill's answer on unchanged."""
    side, one = busy(), consume("d", remote_num_tokens=49, remote_request_id="x")
    side.new_request(one)
    assert (orders(side), asked(side, one)) == (Orders(), [49])


def test_prompts_start_that_the_next_step_can_reach() -> None:
    """60 and 60 tokens fill the next step of 100; the third starts once the first has ended."""
    side = scheduler()
    for name in "abc":
        side.new_request(request(PRODUCE | {"transfer_id": name}, name, tokens=61))
    found = orders(side)
    assert ([expect.request_id for expect in found.expects], found.starts) == (["a", "b", "c"], ["a", "b"])
    assert orders(side).starts == []
    leave(side, request({}, "a", tokens=61))
    assert orders(side).starts == ["c"]


@pytest.mark.parametrize("multiple", [0, BLOCK])
def test_an_engine_that_samples_no_first_tokens_refuses_to(multiple: int) -> None:
    """Its model has states, or it speculates."""
    side = scheduler()
    side.productions.first_token_multiple = multiple
    side.new_request(request(PRODUCE | {"first_token": True}))
    assert len(orders(side).expects) == bool(multiple)


def test_another_choice_waits_for_the_first_ones_prompt() -> None:
    """All choices of one client request share its prompt."""
    side, one, two = scheduler(), consume("0_d"), consume("1_d")
    waits = side.consumptions.awaits_prefix
    for each in (one, two):
        side.new_request(each)
    assert waits("1_d")
    assert asked(side, two) == [0]
    side.consumptions.after_alloc(one, ([1, 2],), 49)
    assert (waits("1_d"), waits("0_d")) == (True, False)
    side.consumptions.received({"0_d"}, set())
    assert not waits("1_d")
    assert len(orders(side).receives) == 1
    late = consume("2_d")
    side.new_request(late)
    assert (waits("2_d"), asked(side, late)) == (False, [0])
    for each in (one, two, late):
        leave(side, each)
    assert (snapshot(side).followers, orders(side)) == (frozenset(), Orders())


@pytest.mark.parametrize("allocated", [False, True])
def test_another_choice_goes_on_when_the_first_one_is_aborted(allocated: bool) -> None:
    side, one = scheduler(), consume("0_d")
    for each in (one, consume("1_d")):
        side.new_request(each)
    if allocated:
        side.consumptions.after_alloc(one, ([1, 2],), 49)
    leave(side, one)
    assert not side.consumptions.awaits_prefix("1_d")
    found = orders(side)
    assert (found.releases, found.aborts) == (([], ["0_d"]) if allocated else ([Release("t", PRODUCER)], []))


def due(worker: Worker) -> list[Due]:
    found: list[Due] = []

    def reported() -> bool:
        found.extend((worker.runtime.report() or WorkerReport()).due)
        return bool(found)

    until(reported)
    return found


def idle(*workers: Worker) -> bool:
    counts = [worker.runtime.counts() for worker in workers]
    return not any(count for each in counts for what, count in each.items() if what != "remembered")


@pytest.mark.parametrize("cancelled", [False, True])
def test_workers_from_the_queue_to_the_kv(worker: Callable[..., Worker], cancelled: bool) -> None:
    """Prefill holds nothing for a request that is cancelled in the queue."""
    producer, consumer = worker("p"), worker("c")
    producer.cache[:] = 7
    consumer.step(queues=[Queue("r", "t", producer.address)])
    producer.step(expects=[EXPECT])
    until(lambda: producer.runtime.counts()["live"] == 1 and bool(snapshot(producer.runtime).producer.consumers))
    assert consumer.runtime.counts()["queued"] == 1
    assert consumer.runtime.report() is None
    if cancelled:
        consumer.step(releases=[Release("t", producer.address)])
        until(lambda: bool(snapshot(producer.runtime).producer.closed))
    producer.step(starts=["q"])
    if not cancelled:
        assert due(consumer) == [Due("r", "t", None)]
        consumer.step(receives=[receive(producer.address)])
    producer.step(chunks=[WHOLE])
    if not cancelled:
        assert results(consumer) == ARRIVED
        assert consumer.cache[[3, 5]].tolist() == producer.cache[[1, 2]].tolist()
    producer.step(finished=[SENT])
    assert results(producer) == ({"q"}, set(), set())
    until(lambda: idle(producer, consumer))
    assert consumer.runtime.report() is None


@pytest.mark.parametrize("met", [False, True])
def test_workers_whose_producer_dies(impatient: Callable[..., Worker], met: bool) -> None:
    """Before or after first contact: decode computes the request and has offered no block."""
    producer, consumer = impatient("p"), impatient("c")
    queue = Queue("r", "t", producer.address)
    if met:
        producer.step(expects=[EXPECT])
        consumer.step(queues=[queue])
        until(lambda: bool(snapshot(producer.runtime).producer.consumers))
    producer.close()
    if not met:
        consumer.step(queues=[queue])
    (found,) = due(consumer)
    assert (found.request_id, found.transfer_id, found.failure is None) == ("r", "t", False)
    assert consumer.runtime.counts()["quarantined"] == 0


# ---- lost engines and wrong parameters ---------------------------------------------------------

SUPERVISOR = "what nobody else knows"
LOST = {"engines_lost": "node-a."}


@pytest.mark.parametrize(
    ("supervisor", "params", "log"),
    [
        (SUPERVISOR, LOST | {"supervisor": SUPERVISOR}, ""),
        # A client of vLLM's own server could otherwise free blocks that a live engine writes to.
        ("", LOST, "ignored LostParams"),
        ("", LOST | {"supervisor": ""}, "ignored LostParams"),
        ("", LOST | {"supervisor": SUPERVISOR}, "ignored LostParams"),
        (SUPERVISOR, LOST, "ignored LostParams"),
        (SUPERVISOR, LOST | {"supervisor": SUPERVISOR[:-1]}, "ignored LostParams"),
        (SUPERVISOR, LOST | {"supervisor": "\u00fc" * 16}, "ignored LostParams"),
        # What is malformed is not there: this engine computes the request, and vLLM's scheduler,
        # which expects a dict, does not see it.
        (SUPERVISOR, {"engines_lost": "", "supervisor": SUPERVISOR}, "computes its prompt"),
        ("", "x", "computes its prompt"),
        ("", ["do_remote_prefill"], "computes its prompt"),
        ("", 7, "computes its prompt"),
        ("", {"do_remote_decode": True, "transfer_id": 7}, "computes its prompt"),
    ],
)
def test_whose_report_of_ended_engines_is_believed(
    caplog: pytest.LogCaptureFixture, supervisor: str, params: Any, log: str
) -> None:
    """A supervisor's, in a request that vLLM passes on as a rejected one: new, then aborted. The
    ranks have it in the next step.
    """
    side = SchedulerConnector(parse_config({"supervisor": supervisor} if supervisor else {}), "c", 1, (), 256)
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    one = Request("lose", [0], sampling, None, abort_immediately=True)
    side.new_request(one)
    assert side.consumptions.matched_tokens(one, 0) == 0
    one.status = RequestStatus.FINISHED_ABORTED
    assert side.finished(one) == (False, None)
    empty = SchedulerOutput.make_empty()
    assert [side.orders(empty), side.orders(empty)] == [Orders(lost=[] if log else ["node-a."]), Orders()]
    assert log in caplog.text
    assert SUPERVISOR not in caplog.text
    assert isinstance(params, dict) or one.kv_transfer_params is None


# ---- images ------------------------------------------------------------------------------------


def test_legs_agree_only_on_the_same_images() -> None:
    """The prompts have the same token ids. Contents, order, number and places of images differ."""
    cases: list[dict[str, Any]] = [{"images": images} for images in ("", "a", "b", "ab", "ba")]
    cases += [{"images": "a", "offset": 5}, {"images": "a", "length": 9}]
    digests = [produced(scheduler(), **case) for case in cases]
    assert digests == [consumed(scheduler(), **case) for case in cases]
    assert len({*digests}) == len(cases)


@pytest.mark.parametrize(
    ("offset", "length", "first_token", "divided"),
    [
        (20, 19, False, False),  # ends before the last token, which decode computes
        (20, 20, False, True),
        (20, 20, True, True),  # whole blocks end at token 32
        (20, 12, True, False),
        (20, 13, True, True),
        (32, 8, True, False),
    ],
)
@pytest.mark.parametrize("whole_images", [True, False])
def test_images_that_a_model_reads_whole(
    offset: int, length: int, first_token: bool, divided: bool, whole_images: bool
) -> None:
    """If tokens of an image attend to later ones, prefill's KV of a part of it would be wrong, so
    neither side transfers it. Other models may divide an image.
    """
    producer, consumer, refused = scheduler(whole_images), scheduler(whole_images), whole_images and divided
    extra = ({"first_token": True}, {"prompt_multiple": BLOCK}) if first_token else ({}, {})
    where: dict[str, Any] = {"images": "a", "offset": offset, "length": length}
    producer.new_request(request(PRODUCE | extra[0], **where))
    one = request(CONSUME | extra[1], **where)
    consumer.new_request(one)
    assert len(orders(producer).expects) == (not refused)
    assert asked(consumer, one) == [0 if refused else 32 if first_token else TOKENS - 1]
    assert orders(consumer).releases == ([Release("t", PRODUCER)] if refused else [])


def test_images_that_vllm_names_by_counters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without both of its own caches vLLM hashes no contents."""
    config = vllm_config(enable_prefix_caching=False)
    check_media(config)
    assert not reads_whole_images(config)
    for cache_gib, prefix_caching in ((4, False), (0, True), (0, False)):
        media = MultiModalConfig(mm_processor_cache_gb=cache_gib)
        monkeypatch.setattr(config.model_config, "multimodal_config", media)
        monkeypatch.setattr(config.cache_config, "enable_prefix_caching", prefix_caching)
        if cache_gib or prefix_caching:
            check_media(config)
    with pytest.raises(ConfigurationError, match="mm_processor_cache_gb"):
        check_media(config)


def vllm_name(color: str, name: str | None, algorithm: MMHasherAlgorithm, **arguments: Any) -> str:
    items = MultiModalDataParser().parse_mm_data({"image": [Image.new("RGB", (8, 8), color)]})
    inputs = ProcessorInputs([1], items, parse_mm_uuids({"image": [name]}), **arguments)
    return inputs.get_mm_hashes("model", algorithm)["image"][0]


def by_content(*names: str) -> bool:
    return named_by_content(request({}, images=names))


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"hf_processor_mm_kwargs": {"max_pixels": 1000}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
    ],
)
def test_an_image_that_a_client_names_is_not_named_by_content(
    algorithm: MMHasherAlgorithm, arguments: dict[str, Any]
) -> None:
    """With arguments of the processor, vLLM names the image by a hash of the client's name.
    Qwen3-VL hashes the name of a video again, with the arguments of this video.
    """
    register()
    for name, content in (("photo", False), (None, True)):
        red, blue = (vllm_name(color, name, algorithm, **arguments) for color in ("red", "blue"))
        assert (red == blue) is not content
        again = MultiModalHasher.hash_kwargs(algorithm, mm_hash=red, fps=2)
        assert [by_content(each) for each in (red, f"adapter:{red}", again)] == [content] * 3
        assert by_content(red, blue) is content
