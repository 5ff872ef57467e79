"""Tiny random models, made where the tests run: real architectures, no tokenizer, weights of a few megabytes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

VOCABULARY = 512
WINDOW_TOKENS = 128


def gemma3(folder: Path, kv_heads: int = 4, seed: int = 0) -> str:
    """A Gemma-3-style hybrid: layers S, S, F, S, S, F, which vLLM puts into three KV cache groups. Its path."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        # The default 0.02 leaves logits so flat that a wrong block would hardly change them.
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Gemma3ForCausalLM(config).float()
    model.save_pretrained(folder)
    return str(folder)
