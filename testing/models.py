"""Create tiny models with random weights for tests.

The architectures are real. Except for ``benchmark_gemma3`` and ``paddle_vl``, the models have no
tokenizer.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from app.demo.paths import MODEL_DIR

VOCABULARY = 576
WINDOW_TOKENS = 128
IMAGE_TOKEN = VOCABULARY
"""Placeholder token of ``paddle_vl``: one per image in a prompt; vLLM replaces it by one per piece
of the image."""


@dataclass(frozen=True)
class SizedModel:
    """Path of a model, and its KV's size: layers of each kind, and float32 bytes per token and
    layer.
    """

    path: str
    shape: dict[str, int]


def gemma3(folder: Path, kv_heads: int = 4, seed: int = 0, sliding: int = 2) -> str:
    """Create a Gemma-3-style hybrid and return its path.

    The layers are ``sliding`` sliding layers and one full layer, twice; vLLM makes sliding + 1 KV
    cache groups of them.
    """
    return _save_gemma3(folder, seed, 128, _layers(sliding, 2), **_attention(kv_heads))


def repeating_gemma3(folder: Path) -> str:
    """Create a ``gemma3`` that repeats tokens, as n-gram drafts expect. Return its path.

    The model's layers add little to the embeddings.
    """
    gemma3(folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
            # Gemma multiplies by 1 + weight.
            weight.fill_(-0.8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def benchmark_gemma3(folder: Path) -> SizedModel:
    """Create a Gemma-3-style model large enough to measure its prefill time.

    It has 12 layers, about 14 million parameters, and the demo model's tokenizer, so that servers
    can stream text.
    """
    attention = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    path = _save_gemma3(folder, 0, 448, _layers(5, 2), **attention)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, folder / name)
    token_bytes = 2 * 4 * 64 * 4
    return SizedModel(path, {"full_layers": 2, "sliding_layers": 10, "token_bytes_a_layer": token_bytes})


def wide_llama(folder: Path) -> SizedModel:
    """Create a full-attention model with much KV and little computation: six layers, 48 KiB per
    token.
    """
    config = LlamaConfig(
        **_SIZES | {"hidden_size": 256, "intermediate_size": 512},
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        num_hidden_layers=6,
    )
    return SizedModel(
        _save(LlamaForCausalLM, config, folder, 0), {"full_layers": 6, "token_bytes_a_layer": 2 * 16 * 64 * 4}
    )


def llama(folder: Path, kv_heads: int = 4, seed: int = 0) -> str:
    config = LlamaConfig(**_SIZES, **_attention(kv_heads), num_hidden_layers=4)
    return _save(LlamaForCausalLM, config, folder, seed)


@dataclass(frozen=True)
class SpeculativeLlama:
    """Paths of a target model, a draft model and an EAGLE head.

    The target accepts most of their draft tokens, but not all.
    """

    target: str
    draft: str
    eagle: str


def speculative_llama(folder: Path, kv_heads: int = 4, seed: int = 0) -> SpeculativeLlama:
    """Create a llama whose first layer contributes most to the logits, with two drafters.

    The draft model has the llama's first two layers, the EAGLE head the first layer. An EAGLE head
    has no norm before its layer, so the embeddings here have a root mean square of 1.
    """
    torch.manual_seed(seed)
    sizes = _SIZES | {"tie_word_embeddings": False}
    target = LlamaForCausalLM(LlamaConfig(**sizes, **_attention(kv_heads), num_hidden_layers=4)).float()
    with torch.no_grad():
        embeddings = target.model.embed_tokens.weight
        # Clamp: the padding token's embedding is zero, and vLLM computes padding for absent drafts.
        embeddings /= embeddings.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-6)
        for layer in list(target.model.layers)[1:]:
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
    target.save_pretrained(folder / "target")

    draft = LlamaForCausalLM(LlamaConfig(**sizes, **_attention(kv_heads), num_hidden_layers=2)).float()
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    draft.save_pretrained(folder / "draft")

    eagle = folder / "eagle"
    eagle.mkdir()
    hidden = _SIZES["hidden_size"]
    head = {
        name.removeprefix("model."): weight.contiguous()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    # Add a little of the target's hidden state, so that the head depends on it.
    head["fc.weight"] = torch.cat([torch.eye(hidden), 0.02 * torch.eye(hidden)], dim=1)
    save_file(head, eagle / "model.safetensors", metadata={"format": "pt"})
    config = LlamaConfig(**sizes, **_attention(kv_heads), num_hidden_layers=1)
    config.architectures = ["EagleLlamaForCausalLM"]
    config.save_pretrained(eagle)
    return SpeculativeLlama(str(folder / "target"), str(folder / "draft"), str(eagle))


def gpt_oss(folder: Path, kv_heads: int = 4, seed: int = 0) -> str:
    """Create a gpt-oss model and return its path.

    It has alternating sliding and full layers, attention sinks, and experts.
    """
    config = GptOssConfig(
        **_SIZES | {"tie_word_embeddings": False},
        **_attention(kv_heads),
        num_hidden_layers=4,
        layer_types=_layers(1, 2),
        sliding_window=WINDOW_TOKENS,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return _save(GptOssForCausalLM, config, folder, seed)


def llama4(folder: Path, kv_heads: int = 4, seed: int = 0) -> str:
    """Create a model with chunked local attention in three of four layers; return its path.

    The fourth layer has full attention without positions.
    """
    config = Llama4TextConfig(
        **_SIZES,
        **_attention(kv_heads),
        num_hidden_layers=4,
        intermediate_size_mlp=256,
        moe_layers=[],
        interleave_moe_layer_step=0,
        attention_chunk_size=WINDOW_TOKENS,
        no_rope_layers=[1, 1, 1, 0],
        num_local_experts=2,
    )
    return _save(Llama4ForCausalLM, config, folder, seed)


def deepseek_v2(folder: Path, seed: int = 0, experts: int = 2) -> str:
    """Create a model with multi-head latent attention; return its path. All layers are dense.

    With ``experts`` 0, vLLM does not count it among the models with experts.

    Its latent head has 576 values, the size for which the CPU kernel is compiled.
    """
    config = DeepseekV2Config(
        **_SIZES | {"tie_word_embeddings": False},
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        # Among vLLM's rotary embeddings only DeepSeek's own is correct for latent attention on the
        # CPU.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=3,
        n_routed_experts=experts,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
    )
    return _save(DeepseekV2ForCausalLM, config, folder, seed)


def falcon_h1(folder: Path, kv_heads: int = 4, state_groups: int = 1, seed: int = 0) -> str:
    """Create a model with attention and Mamba-2 in parallel in every layer. Return its path."""
    config = FalconH1Config(
        **_SIZES,
        **_attention(kv_heads),
        num_hidden_layers=3,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_n_groups=state_groups,
        mamba_d_state=64,
        mamba_chunk_size=64,
    )
    return _save(FalconH1ForCausalLM, config, folder, seed)


def qwen3_next(folder: Path, kv_heads: int = 2, seed: int = 0) -> str:
    """Create a hybrid of gated delta nets and full attention; return its path.

    Three gated delta net layers and a full-attention layer repeat twice. vLLM requires experts in
    one of the layers.
    """
    config = Qwen3NextConfig(
        **_SIZES | {"tie_word_embeddings": False},
        **_attention(kv_heads) | {"head_dim": 128},
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        mlp_only_layers=list(range(1, 8)),
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return _save(Qwen3NextForCausalLM, config, folder, seed)


def paddle_vl(folder: Path, kv_heads: int = 4, seed: int = 0) -> str:
    """Create a PaddleOCR-VL model and return its path.

    It has a vision encoder for images of any size, and positions of three axes as in Qwen-VL. A
    piece of 16 x 16 pixels is one token. The tokenizer is the demo model's, plus image tokens. The
    processors of Qwen-VL and Gemma 3 import torchvision, which requirements-cpu.lock leaves out.
    """
    patch, merge = 8, 2
    text = _SIZES | _attention(kv_heads) | {"vocab_size": VOCABULARY + 64, "num_hidden_layers": 4}
    config = PaddleOCRVLConfig(
        text_config=text | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 64,
            "patch_size": patch,
            "spatial_merge_size": merge,
        },
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=IMAGE_TOKEN + 1,
        vision_end_token_id=IMAGE_TOKEN + 2,
        video_token_id=IMAGE_TOKEN + 3,
    )
    torch.manual_seed(seed)
    model = PaddleOCRVLForConditionalGeneration(config).float()
    with torch.no_grad():
        for weight in model.model.visual.parameters():
            if weight.dim() > 1:
                # Scale from the encoder's fixed initializer range, 0.02, to that of other weights.
                weight *= 10
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": 1,
        "min_pixels": 4 * (patch * merge) ** 2,
        "max_pixels": 100 * (patch * merge) ** 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "PaddleOCRVLProcessor"}))
    names = ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>")
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    # The image tokens' ids must follow the vocabulary's ids without a gap.
    known = len(tokenizer["model"]["vocab"])
    fill = [f"<unused {number}>" for number in range(known, VOCABULARY)]
    tokenizer["model"]["vocab"] |= {name: known + index for index, name in enumerate((*fill, *names))}
    tokenizer["added_tokens"] += [
        {"id": IMAGE_TOKEN + index, "content": name} | flags for index, name in enumerate(names)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    settings["model_specific_special_tokens"] = {"image_token": names[0]}
    settings["extra_special_tokens"] += names[1:]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


# The default initializer range, 0.02, makes logits so flat that a wrong block would hardly change
# them.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _attention(kv_heads: int) -> dict[str, int]:
    return {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 32}


def _save(kind: type[PreTrainedModel], config: PreTrainedConfig, folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    kind(config).float().save_pretrained(folder)
    return str(folder)


def _layers(sliding: int, repeats: int) -> list[str]:
    return (["sliding_attention"] * sliding + ["full_attention"]) * repeats


def _save_gemma3(folder: Path, seed: int, hidden: int, layer_types: list[str], **attention: int) -> str:
    config = Gemma3TextConfig(
        **_SIZES | {"hidden_size": hidden, "intermediate_size": 4 * hidden},
        **attention,
        num_hidden_layers=len(layer_types),
        sliding_window=WINDOW_TOKENS,
        layer_types=layer_types,
    )
    return _save(Gemma3ForCausalLM, config, folder, seed)


def damaged(model: str, share: float) -> str:
    """Return a copy of a checkpoint with noise in its matrices, ``share`` as large as entries."""
    copy = Path(f"{model}-damaged")
    shutil.copytree(model, copy, dirs_exist_ok=True)
    draw = torch.Generator().manual_seed(1)
    weights = load_file(copy / "model.safetensors")
    for name, one in weights.items():
        if one.dim() > 1:
            noise = torch.randn(one.shape, generator=draw).to(one.dtype)
            weights[name] = one + share * one.float().std().to(one.dtype) * noise
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return str(copy)
