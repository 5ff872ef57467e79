"""Checks and identity of images and other multimodal inputs, all called images here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from connectors.errors import ConfigurationError
from connectors.vllm_hma.model.weights import digest_file
from connectors.vllm_hma.upstream.vllm_media_names import is_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.request import Request

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check_media(config: VllmConfig) -> None:
    """Raise ConfigurationError if vLLM names images by counters and not by content: it hashes
    contents only for its processor cache and its prefix cache (vllm/renderers/base.py,
    ``_process_mm_uuids``).
    """
    media = config.model_config.multimodal_config
    if media is None or media.mm_processor_cache_gb > 0 or config.cache_config.enable_prefix_caching:
        return
    raise ConfigurationError(
        "mm_processor_cache_gb: with 0 and without prefix caching, vLLM does not hash images, so KV of different "
        "images cannot be told apart; set mm_processor_cache_gb above 0, or enable_prefix_caching"
    )


def image_processing(model: ModelConfig) -> dict[str, Any] | None:
    """Return the settings and processor files that affect an image's KV; None for a text model.

    vLLM's names of images contain only the content and the request's ``mm_processor_kwargs``
    (vllm/renderers/base.py). A hub model's commit already identifies its processor files. Raises
    OSError if a file cannot be read.
    """
    media = model.multimodal_config
    if media is None:
        return None
    scales = media.mm_encoder_fp8_scale_path
    files = [Path(model.model) / name for name in _PROCESSOR_FILES]
    return {
        # The device changes the tensors only by rounding.
        "kwargs": {key: value for key, value in (media.mm_processor_kwargs or {}).items() if key != "device"},
        "pruning": media.get_video_pruning_spec(),
        "encoder_dtype": media.mm_encoder_attn_dtype,
        "encoder_scales": None if scales is None else digest_file(Path(scales)),
        "files": {file.name: digest_file(file) for file in files if file.is_file()},
    }


def named_by_content(request: Request) -> bool:
    """Return whether the names of all images of a request look like vLLM's digests of content.

    A client's own name is used as it is, or a hash of it, which has a prefix
    (``upstream/vllm_media_names.py``). A client's own digest cannot be told from vLLM's.
    """
    # The name may start with that of a LoRA adapter (vllm/v1/engine/input_processor.py).
    return all(is_digest(each.identifier.rpartition(":")[2]) for each in request.mm_features)


def reads_whole_images(config: VllmConfig) -> bool:
    """Return whether tokens of an image attend to later tokens of this image, as in Gemma 3."""
    return bool(config.model_config.is_mm_prefix_lm)


def divides_image(request: Request, token: int) -> bool:
    positions = (feature.mm_position for feature in request.mm_features)
    return any(position.offset < token < position.offset + position.length for position in positions)
