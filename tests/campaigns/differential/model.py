"""The demo model as both sides serve it: with tokens that mark reasoning, beside a LoRA adapter;
or damaged.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from configs.settings import DEMO_MODEL_DIR

THINK, THOUGHT = "<think>", "</think>"
THINK_ID, THOUGHT_ID = 518, 519
"""The first two ids beyond the demo tokenizer's; the model has rows for them that nobody has
trained.
"""

ADAPTED = ("q_proj", "k_proj", "v_proj")
RANK = 8
DAMAGED = "model.layers.2.self_attn.v_proj.weight"


def thinking_model(folder: Path) -> Path:
    """The demo checkpoint with the two tokens that vLLM's reasoning parsers look for in a
    vocabulary.
    """
    model = folder / "model"
    shutil.copytree(DEMO_MODEL_DIR, model)
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for index, token in ((THINK_ID, THINK), (THOUGHT_ID, THOUGHT)):
        tokenizer["added_tokens"].append({"id": index, "content": token, **flags})
    path.write_text(json.dumps(tokenizer))
    return model


def lora_adapter(folder: Path, seed: int = 1) -> Path:
    """A random adapter of the attention's projections, of a size that changes what the model
    says.
    """
    adapter = folder / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(ADAPTED), "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    draw = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(DEMO_MODEL_DIR / "model.safetensors").items():
        if name.split(".")[-2] in ADAPTED:
            to, of = weight.shape
            base = f"base_model.{name.removesuffix('.weight')}".replace("base_model.", "base_model.model.", 1)
            weights[f"{base}.lora_A.weight"] = torch.randn(RANK, of, generator=draw) * 0.05
            weights[f"{base}.lora_B.weight"] = torch.randn(to, RANK, generator=draw) * 0.05
    save_file(weights, adapter / "adapter_model.safetensors")
    return adapter


def damage(model: Path, share: float) -> None:
    """Add noise to one value projection, `share` as large as its own entries: another checkpoint
    of the same shape.
    """
    path = model / "model.safetensors"
    weights = load_file(path)
    matrix = weights[DAMAGED]
    noise = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(1))
    weights[DAMAGED] = matrix + share * matrix.std() * noise
    save_file(weights, path, metadata={"format": "pt"})
