"""Images in the connector: which KV they share, where their KV may be divided, and settings under
which they have no identity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config.multimodal import MultiModalConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from connectors.errors import ConfigurationError
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.params import EngineAddress
from connectors.store.keys.names import ObjectRef
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.model.media import check_media, reads_whole_images
from connectors.vllm_hma.orders import Orders, Release
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector
from tests.campaigns.store.world import BLOCK_TOKENS
from tests.vllm_contract.caches import vllm_config

TOKENS = 40
PRODUCE = {"do_remote_decode": True, "transfer_id": "t"}
CONSUME = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "p", "remote_host": "h", "remote_port": 9}
BLOCK = 16


def request(params: dict[str, Any], *images: str, offset: int = 4, length: int = 8) -> Request:
    """Return a request of ``TOKENS`` tokens whose images have the given identities, one after the
    other from ``offset`` on.
    """
    features = [
        MultiModalFeatureSpec(None, "image", image, PlaceholderRange(offset + index * length, length))
        for index, image in enumerate(images)
    ]
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request("r", [9] * TOKENS, sampling, None, mm_features=features)


def scheduler(whole_images: bool = False) -> SchedulerConnector:
    groups = (Group(GroupKind.FULL, BLOCK, ()),)
    return SchedulerConnector(parse_config({}), "c", 1, groups, 100, whole_images=whole_images)


def orders(half: SchedulerConnector) -> Orders:
    return half.orders(SchedulerOutput.make_empty())


def digests(*images: str, **where: int) -> tuple[str, str]:
    """Return the prompt digests of both legs of a request with these images."""
    producer, consumer = scheduler(), scheduler()
    producer.new_request(request(PRODUCE, *images, **where))
    consume = request(CONSUME, *images, **where)
    consumer.new_request(consume)
    consumer.after_alloc(consume, ([1, 2, 3],), TOKENS - 1)
    (expect,), (receive,) = orders(producer).expects, orders(consumer).receives
    return expect.prompt_digest, receive.prompt_digest


def test_legs_agree_only_on_the_same_images() -> None:
    """The prompts have the same token ids. Contents, order, number and positions of images differ."""
    cases = [
        digests(),
        digests("a"),
        digests("b"),
        digests("a", "b"),
        digests("b", "a"),
        digests("a", offset=5),
        digests("a", length=9),
    ]
    assert all(producer == consumer for producer, consumer in cases)
    assert len({producer for producer, _ in cases}) == len(cases)
