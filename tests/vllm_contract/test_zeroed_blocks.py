"""Blocks that a transfer fills in part must not keep stale bytes that are NaN in their dtype.

vLLM zeroes the new blocks of hybrid and mixed-precision caches, except those that a connector loads
(``KVCacheConfig.needs_kv_cache_zeroing``, ``get_loaded_kv_cache_group_ids``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from connectors.planning.layout import MemoryKind
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.kv_store.worker import StoreWorker
from connectors.vllm_hma.orders import Orders
from connectors.vllm_hma.worker_side.worker import WorkerConnector
from testing.connector_state import snapshot
from tests.campaigns.schedules import scheduling
from tests.campaigns.schedules.scheduling import BLOCK_TOKENS, STOP_TOKEN, WINDOW_TOKENS, Engine
from tests.vllm_contract.caches import cache_config, full, sliding, vllm_config
from tests.vllm_contract.scheduler_sides import CONSUME
from tests.vllm_contract.test_streaming import SlowFence
from tests.vllm_contract.workers import ARRIVED, FAILED, SENT, Worker, compute, receive, results, until

PROMPT = list(range(10, 110))
Decode = Callable[..., tuple[Worker, SlowFence]]


def mixed(blocks: int) -> KVCacheConfig:
    """Full attention in float32 and windows in bfloat16, which vLLM zeroes."""
    windows = sliding(block_size=BLOCK_TOKENS, sliding_window=WINDOW_TOKENS, dtype=torch.bfloat16)
    cache = cache_config(
        (["model.layers.0.self_attn.attn"], full(block_size=BLOCK_TOKENS)),
        (["model.layers.1.self_attn.attn"], windows),
        (["model.layers.2.self_attn.attn"], windows),
    )
    cache.num_blocks = blocks
    assert cache.needs_kv_cache_zeroing
    return cache


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(scheduling, "kv_cache", mixed)
    made = Engine(0, 60, prefix_caching=True, asynchronous=False)
    yield made
    made.close()


def add(engine: Engine, name: str, prompt: list[int], **params: object) -> None:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params or None})
    sampling.stop_token_ids = [STOP_TOKEN]
    engine.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=engine.hasher))


def step(engine: Engine) -> SchedulerOutput:
    engine.steps += 1
    output = engine.scheduler.schedule()
    engine.scheduler.update_from_output(output, engine.execute(output))
    return output


def test_vllm_zeroes_the_blocks_that_a_transfer_fills_in_part(engine: Engine) -> None:
    """The last block of full attention, and the first and last of each window; no block that the
    prefix cache shares, and none that the transfer fills.
    """
    add(engine, "earlier", PROMPT[:40])
    while engine.scheduler.requests:
        step(engine)
    engine.later = lambda most=40: engine.steps + 3  # type: ignore[method-assign]
    add(engine, "r", PROMPT, **CONSUME)
    output = step(engine)
    (order,) = output.kv_connector_metadata.receives
    # 32 tokens are cached; 67 arrive, up to token 99, whose window starts with token 52.
    assert (order.start_token, order.end_token) == (32, 99)
    everything, *windows = order.tables
    zeroed = output.new_block_ids_to_zero
    assert zeroed is not None
    assert {*everything[:2], *everything[3:6]}.isdisjoint(zeroed)
    assert {everything[6], *(window[at] for window in windows for at in (3, 6))} <= {*zeroed}


@pytest.fixture
def decode(worker: Callable[..., Worker]) -> Decode:
    """Create a consumer whose cache is on an accelerator, and its device."""

    def make(zeroes_blocks: bool = True) -> tuple[Worker, SlowFence]:
        fence, memory = SlowFence(), MemoryKind("VRAM", 0)
        made = worker("c", memory_kind=memory, integrity="off", fence=fence, zeroes_blocks=zeroes_blocks)
        return made, fence

    return make


def test_the_order_waits_for_the_kernels_that_zero(worker: Callable[..., Worker], decode: Decode) -> None:
    """On an accelerator, kernels are queued: no byte of the transfer may arrive before they run."""
    producer, (consumer, fence) = worker("p", integrity="off"), decode()
    consumer.step(receives=[receive(producer.address)])
    assert snapshot(consumer.runtime).consumer.receptions == {}
    fence.done.update(fence.marked)
    compute(producer)
    assert results(consumer) == ARRIVED


class CopiesEnd(torch.cpu.Event):
    """An event that has not passed when the connector asks."""

    def query(self) -> bool:
        return False


def test_the_order_waits_for_the_copies_of_a_store(
    worker: Callable[..., Worker], decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may read or write blocks that vLLM has freed and gives to the request."""
    producer, (consumer, fence), end = worker("p", integrity="off"), decode(zeroes_blocks=False), CopiesEnd()
    connector = WorkerConnector(parse_config({}), "c", vllm_config(), cache_config((["f"], full())))
    connector._runtime = consumer.runtime  # noqa: SLF001
    monkeypatch.setattr(StoreWorker, "_touched", (end,))
    connector.after_forward(Orders(receives=[receive(producer.address)]))
    assert snapshot(consumer.runtime).consumer.receptions == {}
    fence.done.add(end)
    until(lambda: snapshot(consumer.runtime).consumer.receptions == {"r": "offered"})
    assert fence.marked == []


@pytest.mark.parametrize("lost", [False, True], ids=["aborted", "its engine is lost"])
def test_a_request_that_ends_before_the_kernels_have_run(
    worker: Callable[..., Worker], decode: Decode, lost: bool
) -> None:
    """The request has offered no blocks: vLLM frees them, and prefill does not await its lease. A
    supervisor reports a lost engine once: later, only a failed handshake would end the wait.
    """
    producer, other, (consumer, fence) = worker("p", integrity="off"), worker("o", integrity="off"), decode()
    consumer.step(receives=[receive(producer.address), receive(other.address, "s", "u")])
    consumer.step(**({"lost": ["p"]} if lost else {"aborts": ["r"]}))
    assert consumer.runtime.results() == FAILED
    if not lost:
        compute(producer)
        producer.step(finished=[SENT])
        assert results(producer) == ({"q"}, set(), set())
    fence.done.update(fence.marked)
    until(lambda: snapshot(consumer.runtime).consumer.receptions == {"s": "offered"})
