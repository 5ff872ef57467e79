"""Checks of images and other multimodal inputs, which these docstrings call images.

They determine whether names of images identify the content, and whether a prompt's first tokens
end within an image.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from connectors.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_DIGEST = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
"""Digests of BLAKE3 or SHA-256, and of SHA-512 (VLLM_MM_HASHER_ALGORITHM)."""


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
    that name as it is (vllm/multimodal/processing/inputs.py). With ``mm_processor_kwargs`` or
    ``media_io_kwargs``, vLLM uses a hash of the client's name. This function cannot tell such a
    hash from a digest of content.
    """
    # The name may start with that of a LoRA adapter (vllm/v1/engine/input_processor.py).
    return all(_DIGEST.fullmatch(each.identifier.rpartition(":")[2]) for each in request.mm_features)


def reads_whole_images(config: VllmConfig) -> bool:
    """Return whether tokens of an image attend to later tokens of this image, as in Gemma 3."""
    return bool(config.model_config.is_mm_prefix_lm)


def divides_image(request: Request, token: int) -> bool:
    """Return whether the prompt's first ``token`` tokens end within an image."""
    positions = (feature.mm_position for feature in request.mm_features)
    return any(position.offset < token < position.offset + position.length for position in positions)
