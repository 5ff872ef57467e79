"""Images in the connector: which KV they share, where their KV may be divided, and settings under
which they have no identity.
"""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image
from vllm.config.multimodal import MMHasherAlgorithm, MultiModalConfig
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids
from vllm.multimodal.processing.inputs import ProcessorInputs

from connectors.errors import ConfigurationError
from connectors.vllm_hma.model.media import check_media, named_by_content, reads_whole_images
from connectors.vllm_hma.orders import Release
from connectors.vllm_hma.plugin import register
from tests.vllm_contract.caches import vllm_config
from tests.vllm_contract.scheduler_sides import (
    BLOCK,
    CONSUME,
    PRODUCE,
    PRODUCER,
    TOKENS,
    orders,
    request,
    scheduler,
    start,
)


def digests(*images: str, **where: Any) -> tuple[str, str]:
    """Return the prompt digests of both legs of a request with these images."""
    (expect,) = start(scheduler(), request(PRODUCE, images=images, **where)).expects
    (receive,) = start(scheduler(), request(CONSUME, images=images, **where)).receives
    return expect.prompt_digest, receive.prompt_digest


def test_legs_agree_only_on_the_same_images() -> None:
    """The prompts have the same token ids. Contents, order, number and places of images differ."""
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
def test_images_that_a_model_reads_whole(offset: int, length: int, first_token: bool, divided: bool) -> None:
    """If tokens of an image attend to later ones, prefill's KV of a part of it would be wrong, so
    neither side transfers it. Other models may divide an image.
    """
    first = {"first_token": True} if first_token else {}
    multiple = {"prompt_multiple": BLOCK} if first_token else {}
    for whole_images in (True, False):
        producer, consumer = scheduler(whole_images), scheduler(whole_images)
        producer.new_request(request(PRODUCE | first, images=("a",), offset=offset, length=length))
        consume = request(CONSUME | multiple, images=("a",), offset=offset, length=length)
        consumer.new_request(consume)
        refused = whole_images and divided
        assert len(orders(producer).expects) == (not refused)
        assert consumer.consumptions.matched_tokens(consume, 0) == (0 if refused else 32 if first_token else TOKENS - 1)
        assert orders(consumer).releases == ([Release("t", PRODUCER)] if refused else [])


def test_images_that_vllm_names_by_counters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without both of its own caches vLLM hashes no contents."""
    config = vllm_config(enable_prefix_caching=False)
    check_media(config)
    assert not reads_whole_images(config)
    for cache_gib, prefix_caching, refused in ((4, False, False), (0, True, False), (0, False, True)):
        media = MultiModalConfig(mm_processor_cache_gb=cache_gib)
        monkeypatch.setattr(config.model_config, "multimodal_config", media)
        monkeypatch.setattr(config.cache_config, "enable_prefix_caching", prefix_caching)
        if refused:
            with pytest.raises(ConfigurationError, match="mm_processor_cache_gb: with 0 and without prefix caching"):
                check_media(config)
        else:
            check_media(config)


def vllm_name(color: str, name: str | None, algorithm: MMHasherAlgorithm, **arguments: Any) -> str:
    """Return vLLM's name of an image of one color that a client names ``name``."""
    items = MultiModalDataParser().parse_mm_data({"image": [Image.new("RGB", (8, 8), color)]})
    inputs = ProcessorInputs([1], items, parse_mm_uuids({"image": [name]}), **arguments)
    return inputs.get_mm_hashes("model", algorithm)["image"][0]


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
    """With arguments of the processor, vLLM names the image by a hash of the client's name."""
    register()
    red, blue = (vllm_name(color, "photo", algorithm, **arguments) for color in ("red", "blue"))
    assert red == blue
    assert not named_by_content(request({}, images=(red,)))
    assert not named_by_content(request({}, images=(f"adapter:{red}",)))
    red, blue = (vllm_name(color, None, algorithm, **arguments) for color in ("red", "blue"))
    assert red != blue
    assert named_by_content(request({}, images=(red, blue)))
    assert named_by_content(request({}, images=(f"adapter:{red}",)))


def test_a_hash_of_a_clients_name_and_other_arguments_is_not_named_by_content() -> None:
    """Qwen3-VL hashes the name of a video again, with the arguments of this video."""
    register()
    arguments = {"hf_processor_mm_kwargs": {"fps": 2}}
    for name, by_content in (("clip", False), (None, True)):
        for first in (vllm_name("red", name, "blake3"), vllm_name("red", name, "blake3", **arguments)):
            again = MultiModalHasher.hash_kwargs("blake3", mm_hash=first, fps=2)
            assert named_by_content(request({}, images=(again,))) is by_content
