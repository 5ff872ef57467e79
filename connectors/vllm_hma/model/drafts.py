"""Speculative decoding: which methods keep KV of drafts in the cache, and whose KV can be sent.

Methods without a model (n-gram, suffix) and Medusa keep none. A draft model, EAGLE and MTP add
layers to the KV cache. Wrong KV of a draft cannot change an answer: the target model verifies every
token.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from connectors.errors import ConfigurationError
from connectors.vllm_hma.model.identity import weights_identity

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

TRANSFERABLE_METHODS = ("draft_model", "eagle", "eagle3", "mtp")


def check_method(config: VllmConfig) -> None:
    """Raise ConfigurationError if KV of the configured drafts cannot be transferred."""
    speculative = drafting(config)
    if speculative is None:
        return
    if speculative.method not in TRANSFERABLE_METHODS:
        raise ConfigurationError(
            f"speculative_config: the connector does not support method {speculative.method!r}, which keeps KV of its "
            f"own; use {', '.join(TRANSFERABLE_METHODS)}, or a method without KV such as ngram"
        )
    if config.num_prefill_lookahead_tokens > 1:
        raise ConfigurationError(
            f"speculative_config: the drafts' KV of a token depends on the next {config.num_prefill_lookahead_tokens} "
            "tokens, but a prefill engine knows only one token after the KV that it sends; use a single MTP module"
        )


def check_store(config: VllmConfig) -> None:
    """Raise ConfigurationError if the cache holds KV of drafts: storing it is not tested."""
    speculative = drafting(config)
    if speculative is not None:
        raise ConfigurationError(
            f"store: the KV store does not support speculative_config with method {speculative.method!r}, which keeps "
            "KV of drafts; remove the store, or use a method without KV such as ngram"
        )


def drafting(config: VllmConfig) -> SpeculativeConfig | None:
    """Return the speculative configuration; None if its drafts have no KV in the cache."""
    speculative = config.speculative_config
    return speculative if speculative is not None and speculative.uses_draft_kv_cache() else None


def reads_next_token(config: VllmConfig) -> bool:
    """Return whether a draft's KV at a position depends on the next token, as in EAGLE and MTP."""
    return config.num_prefill_lookahead_tokens > 0


def draft_identity(config: VllmConfig, unchanged_since_s: float = math.inf) -> str:
    """Without the number of speculated tokens, which may differ; empty without KV of drafts."""
    speculative = drafting(config)
    if speculative is None:
        return ""
    draft, load_format = speculative.draft_model_config, config.load_config.load_format
    weights = weights_identity(draft, load_format, unchanged_since_s=unchanged_since_s)
    return hashlib.blake2b(f"{speculative.method}:{weights}".encode(), digest_size=16).hexdigest()


def model_of(config: VllmConfig, layer: str) -> ModelConfig:
    """Return the configuration of the model that has this layer: the target's or the draft's.

    A draft model's layers have a prefix. EAGLE and MTP number their layers after the target's
    (vLLM's ``models/llama_eagle.py``).
    """
    speculative = drafting(config)
    if speculative is None:
        return config.model_config
    numbers = [int(part) for part in layer.split(".") if part.isdecimal()]
    after_target = bool(numbers) and numbers[0] >= config.model_config.get_total_num_hidden_layers()
    if layer.startswith("draft_model.") or after_target:
        return speculative.draft_model_config
    return config.model_config
