"""Checks of images and other multimodal inputs, which these docstrings call images.

They determine whether names of images identify the content, and whether a prompt's first tokens
end within an image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from connectors.errors import ConfigurationError
from connectors.vllm_hma.upstream.vllm_media_names import is_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def check_media(config: VllmConfig) -> None:
    """Raise ConfigurationError if vLLM names images by counters and not by content.

    vLLM hashes contents only for its processor cache and its prefix cache
    (vllm/renderers/base.py, ``_process_mm_uuids``).
    """
    media = config.model_config.multimodal_config
    if media is None or media.mm_processor_cache_gb > 0 or config.cache_config.enable_prefix_caching:
        return
    raise ConfigurationError(
        "mm_processor_cache_gb: with 0 and without prefix caching, vLLM does not hash images, so KV of different "
        "images cannot be told apart; set mm_processor_cache_gb above 0, or enable_prefix_caching"
    )


def named_by_content(request: Request) -> bool:
    """Return whether the names of all images of a request look like vLLM's digests of content.

    A client of a vLLM server may name an image itself (``uuid`` of a content part), and vLLM takes
    that name as it is, or a hash of it, which has a prefix (``upstream/vllm_media_names.py``). This
    function cannot tell a client's own digest from vLLM's.
    """
    # The name may start with that of a LoRA adapter (vllm/v1/engine/input_processor.py).
    return all(is_digest(each.identifier.rpartition(":")[2]) for each in request.mm_features)


def reads_whole_images(config: VllmConfig) -> bool:
    """Return whether tokens of an image attend to later tokens of this image, as in Gemma 3."""
    return bool(config.model_config.is_mm_prefix_lm)


def divides_image(request: Request, token: int) -> bool:
    """Return whether the prompt's first ``token`` tokens end within an image."""
    positions = (feature.mm_position for feature in request.mm_features)
    return any(position.offset < token < position.offset + position.length for position in positions)
