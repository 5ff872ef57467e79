"""Identity of model and dtypes, which must be equal on engines that exchange KV."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
import vllm
from vllm.platforms import current_platform
from vllm.transformers_utils.config import iter_rope_parameters

from connectors.protocol.agent_metadata import ModelIdentity
from connectors.vllm_hma.model.weights import digest_weights

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)


def model_identity(config: VllmConfig, draft: str = "") -> ModelIdentity:
    """Return the model's identity. ``draft`` is the draft model's identity (``drafts.py``).

    Reads all weights of a local model once per host (``weights.py``).
    """
    model = config.model_config
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{weights_identity(model)}:".encode())
    # The configuration as loaded, which includes hf_overrides.
    effective = {key: value for key, value in model.hf_config.to_dict().items() if key != "_name_or_path"}
    effective["tandem"] = [
        str(model.quantization),
        repr(model.quantization_config),
        config.load_config.load_format == "dummy",
        _uses_long_rope(model),
    ]
    digest.update(json.dumps(effective, sort_keys=True, default=str).encode())
    return ModelIdentity(
        model=digest.hexdigest(),
        dtype=str(model.dtype),
        cache_dtype=resolved_cache_dtype(config.cache_config.cache_dtype, model),
        engine_version=vllm.__version__,
        draft=draft,
    )


def _uses_long_rope(model: ModelConfig) -> bool:
    """Return whether LongRoPE uses its long factors; the maximum length selects them for all.

    Source: vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py
    """
    return any(
        positions.get("rope_type") == "longrope"
        and model.max_model_len > positions.get("original_max_position_embeddings", model.max_model_len)
        for positions in iter_rope_parameters(model.hf_text_config)
    )


def resolved_cache_dtype(name: str, model: ModelConfig) -> str:
    """Return the dtype that ``kv_cache_dtype`` selects: ``auto`` and ``bfloat16`` may be the same.

    torch's dtype does not suffice: vLLM stores every kind of FP8 as uint8.
    """
    if name == "auto":
        return str(model.dtype).removeprefix("torch.")
    if name in ("fp8", "fp8_e4m3"):
        return str(current_platform.fp8_dtype()).removeprefix("torch.")
    return name


def weights_identity(model: ModelConfig) -> str:
    """Return the digest of a local model's weights, or the commit of a Hugging Face Hub model."""
    return named_weights(model.model, model.revision)


def named_weights(name: str, revision: str | None) -> str:
    """Return the digest of the weights at a path, or the commit of a Hugging Face Hub model."""
    path = Path(name)
    if path.exists():
        return digest_weights(path)
    commit = _commit(name, revision)
    if commit is None:
        logger.warning(
            "Tandem: revision %s of %s cannot be resolved to a commit; set `revision` to a commit on all engines",
            revision,
            name,
        )
    return f"{name}@{commit or revision}"


def _commit(repository: str, revision: str | None) -> str | None:
    """Return the commit of a revision, from vLLM or the hub's local cache; None if unknown."""
    # huggingface_hub's ResolvedRevision is a str equal to the requested revision, for example
    # "main".
    resolved = getattr(revision, "resolved", None) or revision
    if resolved and len(resolved) == 40 and all(character in "0123456789abcdef" for character in resolved):
        return str(resolved)
    try:
        cached = huggingface_hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    except ValueError:  # not a valid name of a hub repository
        return None
    # .../snapshots/<commit>/config.json
    return Path(cached).parent.name if isinstance(cached, str) else None
