"""vLLM's configuration of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from actors.engine.vllm_engine import VllmEngine, engine_config, frontend_digest
from configs.settings.parsing import parse_settings
from configs.settings.service import DEMO_MODEL_DIR


@pytest.mark.parametrize("tp_size", [1, 2])
def test_batch_defaults_are_those_of_vllm_serve(tp_size: int) -> None:
    """Batch sizes are those of a server: larger on a GPU, and on a CPU with two ranks."""
    arguments = AsyncEngineArgs(model=str(DEMO_MODEL_DIR), tensor_parallel_size=tp_size, enforce_eager=True)
    tokens, sequences = (each[UsageContext.OPENAI_API_SERVER] for each in AsyncEngineArgs.get_batch_defaults(tp_size))
    found = engine_config(arguments).scheduler_config
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, sequences)


def test_engines_that_answer_differently_are_not_alike() -> None:
    """A stream does not move to an engine whose sampler differs."""
    changes: list[dict[str, Any]] = [
        {},
        {"max_model_len": 1024},
        {"max_logprobs": 5},
        {"logprobs_mode": "processed_logprobs"},
        {"logits_processors": ["package:Processor"]},
    ]

    def digest(**more: Any) -> str:
        config = engine_config(AsyncEngineArgs(model=str(DEMO_MODEL_DIR), enforce_eager=True, **more))
        return frontend_digest({}, "template", config)

    assert len({digest(**one) for one in changes}) == len(changes)
    assert digest() == digest()


async def test_weights_are_hashed_while_vllm_loads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers need the digests after loading; reading the files again could take minutes."""
    begun: list[Path] = []

    def load(*_: object) -> None:
        begun.append(Path("vLLM loads"))
        raise RuntimeError("far enough")

    for patched in ("kill_process_tree.ignore_ended_processes", "resource_tracker.detach_resource_tracker"):
        monkeypatch.setattr(f"actors.upstream.vllm_processes.{patched}", lambda: None)
    monkeypatch.setattr("actors.engine.vllm_engine.may_fork", lambda *_: False)
    monkeypatch.setattr("connectors.vllm_hma.model.weights.begin_digests", begun.append)
    monkeypatch.setattr("actors.upstream.vllm_replaying_llm.ReplayingLLM.start", load)
    settings = parse_settings({"engine": {"max_model_len": 2048}})
    with pytest.raises(RuntimeError, match="far enough"):
        await VllmEngine.start(settings, "prefill", "127.0.0.1")
    assert begun == [Path(settings.model_path), Path("vLLM loads")]
