"""A stored prefix that one rank fails to load: decode never uses KV that the step computed from
it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connectors.vllm_hma.orders import Chunk, Expect, Finished, Orders
from connectors.vllm_hma.worker_side.last_chunks import Streaming
from tests.vllm_contract.workers import DIGEST, Worker, receive, results, until


@pytest.mark.parametrize("streaming", [Streaming.CHUNK, Streaming.LAYER])
def test_decode_computes_a_prompt_whose_load_failed(worker: Callable[..., Worker], streaming: Streaming) -> None:
    """The forward pass of that step used wrong blocks; vLLM computes the prompt again, in other
    blocks.
    """
    producer, consumer = worker("p", streaming=streaming), worker("c")
    producer.cache[:] = 0xEE
    producer.step(expects=[Expect("q", "t", 7, DIGEST)], starts=["q"])
    consumer.step(receives=[receive(producer.address)])
    until(lambda: producer.runtime.counts()["live"] == 1)
    step = Orders(chunks=[Chunk("q", ((1, 2),), 7, last=True)])
    producer.runtime.before_forward(step)
    # Where the connector loads: before the forward pass.
    producer.runtime.spoil({"q"}, "its load failed")
    producer.runtime.layer_computed("layer")
    producer.runtime.after_forward(step)
    assert results(consumer) == (set(), {"r"}, {"r"})
    # The request runs again on this rank, and its blocks are freed at its end.
    producer.step(chunks=[Chunk("q", ((4, 5),), 7, last=True)])
    producer.step(finished=[Finished("q", True, "")])
    assert results(producer) == ({"q"}, set(), set())
    assert (consumer.cache == 0).all(), "nothing of that step was written"
