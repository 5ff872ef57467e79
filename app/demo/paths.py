"""Path of the embedded demo checkpoint."""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
"""Directory with config.json, model.safetensors and tokenizer; a valid vLLM `model` argument."""
