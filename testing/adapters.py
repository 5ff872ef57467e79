"""Create LoRA adapters with random weights for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 8
ADAPTED = ("q_proj", "k_proj", "v_proj")


def lora_adapter(folder: Path, model: Path, seed: int = 1) -> Path:
    """Create an adapter of the attention projections in the new ``folder`` and return its path.

    Its weights are large enough to change the model's output.
    """
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(ADAPTED), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    draw = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.split(".")[-2] in ADAPTED:
            to, of = weight.shape
            base = f"base_model.model.{name.removesuffix('.weight')}"
            weights[f"{base}.lora_A.weight"] = torch.randn(RANK, of, generator=draw) * 0.05
            weights[f"{base}.lora_B.weight"] = torch.randn(to, RANK, generator=draw) * 0.05
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
