"""vLLM's configuration of an engine."""

from __future__ import annotations

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from actors.engine.vllm_engine import engine_config
from configs.settings.service import DEMO_MODEL_DIR


@pytest.mark.parametrize("tp_size", [1, 2])
def test_batch_defaults_are_those_of_vllm_serve(tp_size: int) -> None:
    """Batch sizes are those of a server: larger on a GPU, and on a CPU with two ranks."""
    arguments = AsyncEngineArgs(model=str(DEMO_MODEL_DIR), tensor_parallel_size=tp_size, enforce_eager=True)
    tokens, sequences = (each[UsageContext.OPENAI_API_SERVER] for each in AsyncEngineArgs.get_batch_defaults(tp_size))
    found = engine_config(arguments).scheduler_config
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, sequences)
