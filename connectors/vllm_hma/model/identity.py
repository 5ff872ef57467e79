"""Identity of model and dtypes, which must be equal on engines that exchange KV."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
import vllm
from huggingface_hub.constants import DEFAULT_REVISION
from vllm.platforms import current_platform
from vllm.transformers_utils.config import iter_rope_parameters

from connectors.errors import ConfigurationError
from connectors.protocol.agent_metadata import ModelIdentity
from connectors.vllm_hma.model.media import image_processing
from connectors.vllm_hma.model.weights import digest_weights

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)


def model_identity(
    config: VllmConfig, draft: str = "", stored: bool = False, unchanged_since_s: float = math.inf
) -> ModelIdentity:
    """Return the identity of an engine's model.

    ``draft``              identity of the draft model (``drafts.py``); empty: none
    ``stored``             whether KV with this identity outlives the engine, in a KV store
    ``unchanged_since_s``  as in ``digest_weights``

    Raises as ``weights_identity``, and OSError if a file of the model cannot be read.
    """
    model = config.model_config
    digest = hashlib.blake2b(digest_size=16)
    weights = weights_identity(model, config.load_config.load_format, stored, unchanged_since_s)
    digest.update(f"{weights}:".encode())
    # The configuration as loaded, which includes hf_overrides.
    effective = {key: value for key, value in model.hf_config.to_dict().items() if key != "_name_or_path"}
    effective["tandem"] = [
        str(model.quantization),
        repr(model.quantization_config),
        config.load_config.load_format == "dummy",
        _uses_long_rope(model),
    ]
    if (processing := image_processing(model)) is not None:
        effective["tandem"].append(processing)
    digest.update(json.dumps(effective, sort_keys=True, default=str).encode())
    return ModelIdentity(
        model=digest.hexdigest(),
        dtype=str(model.dtype),
        cache_dtype=resolved_cache_dtype(config.cache_config.cache_dtype, model),
        engine_version=vllm.__version__,
        draft=draft,
    )


def _uses_long_rope(model: ModelConfig) -> bool:
    """Return whether LongRoPE uses its long factors: ``max_model_len`` selects them for prompts of
    all lengths (vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py).
    """
    return any(
        positions.get("rope_type") == "longrope"
        and model.max_model_len > positions.get("original_max_position_embeddings", model.max_model_len)
        for positions in iter_rope_parameters(model.hf_text_config)
    )


def resolved_cache_dtype(name: str, model: ModelConfig) -> str:
    """Return the name of the dtype that a value of vLLM's ``kv_cache_dtype`` selects.

    ``auto`` selects the model's, ``fp8`` the platform's kind of E4M3. torch's dtype does not
    suffice: vLLM stores every kind of FP8 as uint8.
    """
    if name == "auto":
        return str(model.dtype).removeprefix("torch.")
    if name in ("fp8", "fp8_e4m3"):
        return str(current_platform.fp8_dtype()).removeprefix("torch.")
    return name


def weights_identity(
    model: ModelConfig, load_format: str, stored: bool = False, unchanged_since_s: float = math.inf
) -> str:
    """Return a string that identifies a model's weights; arguments as for ``model_identity``.

    It is a digest of local files, or ``name@commit`` of a Hugging Face Hub model. It is
    ``name@revision`` if the commit is unknown, and the URL of weights in object storage, both with
    a warning, or ConfigurationError if ``stored``. Raises as ``digest_weights``.
    """
    if load_format == "dummy":  # vLLM makes the weights from a fixed seed
        return "dummy"
    if model.model_weights:  # `model` is then a local folder without them (vllm/config/model.py)
        return _unverified(f"the weights in {model.model_weights}", "use a local copy", model.model_weights, stored)
    name, path = model.model, Path(model.model)
    if path.exists():
        return digest_weights(path, unchanged_since_s)
    commit = _commit(name, model.revision)
    if commit is None:
        revision = model.revision or DEFAULT_REVISION  # the hub's default
        remedy = "set `revision` to a commit on all engines"
        return _unverified(f"revision {revision} of {name}", remedy, f"{name}@{revision}", stored)
    return f"{name}@{commit}"


def _unverified(what: str, remedy: str, identity: str, stored: bool) -> str:
    if stored:
        raise ConfigurationError(
            f"KV store: {what} may change without notice, and stored KV of earlier weights would be used; {remedy}"
        )
    logger.warning("Tandem: %s may differ between engines without notice; %s", what, remedy)
    return identity


def _commit(repository: str, revision: str | None) -> str | None:
    # huggingface_hub's ResolvedRevision is a str equal to the requested revision, for example
    # "main"; its attribute ``resolved`` is the commit.
    resolved = getattr(revision, "resolved", None) or revision
    if re.fullmatch("[0-9a-f]{40}", resolved or ""):
        return str(resolved)
    try:
        cached = huggingface_hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    except ValueError:  # not a valid name of a hub repository
        return None
    # .../snapshots/<commit>/config.json
    return Path(cached).parent.name if isinstance(cached, str) else None
