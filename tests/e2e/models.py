"""Tiny random models, made where the tests run: real architectures, no tokenizer, weights of a few megabytes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from app.demo.paths import MODEL_DIR

VOCABULARY = 576
WINDOW_TOKENS = 128


@dataclass(frozen=True)
class SizedModel:
    """A model's path and what its KV weighs: layers of each kind, and bytes of one token of one layer in float32."""

    path: str
    shape: dict[str, int]


def gemma3(folder: Path, kv_heads: int = 4, seed: int = 0) -> str:
    """A Gemma-3-style hybrid: layers S, S, F, S, S, F, which vLLM puts into three KV cache groups. Its path."""
    _save_gemma3(folder, seed, hidden=128, layer_types=_layers(2, 2), heads=4, kv_heads=kv_heads, head_dim=32)
    return str(folder)


def benchmark_gemma3(folder: Path) -> SizedModel:
    """The same kind of model, large enough that prefill takes a while: 12 layers, about 14 million parameters.

    It carries the demo model's tokenizer, so that servers can stream text.
    """
    _save_gemma3(folder, 0, hidden=448, layer_types=_layers(5, 2), heads=8, kv_heads=4, head_dim=64)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, folder / name)
    token_bytes = 2 * 4 * 64 * 4
    return SizedModel(str(folder), {"full_layers": 2, "sliding_layers": 10, "token_bytes_a_layer": token_bytes})


def _layers(sliding: int, repeats: int) -> list[str]:
    return (["sliding_attention"] * sliding + ["full_attention"]) * repeats


def _save_gemma3(
    folder: Path, seed: int, hidden: int, layer_types: list[str], heads: int, kv_heads: int, head_dim: int
) -> None:
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=len(layer_types),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=WINDOW_TOKENS,
        layer_types=layer_types,
        max_position_embeddings=4096,
        # The default 0.02 leaves logits so flat that a wrong block would hardly change them.
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).float().save_pretrained(folder)
