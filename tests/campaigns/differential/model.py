"""The demo model for both sides, with tokens that mark reasoning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from configs.settings.service import DEMO_MODEL_DIR

THINK, THOUGHT = "<think>", "</think>"
THINK_ID, THOUGHT_ID = 518, 519
"""The first two ids beyond the demo tokenizer's; the model has untrained rows
for them.
"""


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
