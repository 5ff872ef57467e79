"""Speculative decoding: what its KV is, whose it is, and which methods are refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from app.demo.paths import MODEL_DIR
from connectors.errors import ConfigurationError, UnsupportedCacheError
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.model.drafts import draft_identity, reads_next_token
from connectors.vllm_hma.model.translate import group_shapes, total_heads
from connectors.vllm_hma.upstream.vllm_request_prompt import drop_last_token, sample_last_token
from tests.vllm_contract.caches import BLOCK_TOKENS, cache_config, cache_folder, connector_config, full, vllm_config

TARGET_LAYERS, TARGET_HEADS = 6, 4
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


@pytest.fixture(scope="module", autouse=True)
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep digests of weights out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(cache_folder(tmp_path_factory.mktemp("cache"))))
        yield


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    config = LlamaConfig(
        vocab_size=576, hidden_size=64, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=1
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shutil.copy(MODEL_DIR / "model.safetensors", folder)
    return folder


def config(speculation: dict[str, Any] | None, **overrides: Any) -> VllmConfig:
    made: VllmConfig = vllm_config.__wrapped__(
        speculative_config=speculation, max_model_len=512, skip_tokenizer_init=True, **overrides
    )
    return made


def drafting(folder: Path, method: str = "draft_model", tokens: int = 3, **overrides: Any) -> VllmConfig:
    return config({"method": method, "model": str(folder), "num_speculative_tokens": tokens}, **overrides)


def test_a_draft_is_its_method_and_weights(draft: Path) -> None:
    """The number of speculated tokens is no part of it, and n-gram drafts have no KV."""
    ours = draft_identity(drafting(draft))
    assert ours == draft_identity(drafting(draft, tokens=5))
    assert ours != draft_identity(drafting(draft, "eagle"))
    assert draft_identity(config(None)) == draft_identity(config(NGRAM)) == ""
    weights = load_file(draft / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    assert ours != draft_identity(drafting(draft))


def test_heads_of_a_layer_are_its_own_models(draft: Path) -> None:
    """With one KV head on each of 4 ranks, the target's layers are cut and the draft's are
    replicas.
    """
    own = drafting(draft, tensor_parallel_size=4)
    eagle = drafting(draft, "eagle", tensor_parallel_size=4)
    target, after = (f"model.layers.{index}.self_attn.attn" for index in (TARGET_LAYERS - 1, TARGET_LAYERS))
    one = full(num_kv_heads=1)
    assert total_heads(own, target, one) == total_heads(eagle, target, one) == TARGET_HEADS
    assert total_heads(own, "draft_model.model.layers.0.self_attn.attn", one) == 1
    assert total_heads(eagle, after, one) == 1


def test_only_eagle_reads_the_next_token(draft: Path) -> None:
    assert reads_next_token(drafting(draft, "eagle"))
    assert not reads_next_token(drafting(draft))
    assert not reads_next_token(config(NGRAM))


def test_the_prompts_last_token_is_the_one_sampled() -> None:
    """The caller's parameters stay as they are; a prompt of one token is not transferred, and a
    grammar may reject the prompt's token.
    """
    shared = SamplingParams(max_tokens=1)
    request = Request("r", [5, 6, 7], shared, None)
    sample_last_token(request)
    drop_last_token(request)
    assert request.prompt_token_ids == [5, 6]
    assert request.sampling_params is not None
    assert request.sampling_params.allowed_token_ids == [7]
    assert shared.allowed_token_ids is None
    grammar = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(json="{}"))
    for prompt, params in (([5], shared), ([5, 6, 7], grammar)):
        free = Request("s", prompt, params, None)
        sample_last_token(free)
        assert free.sampling_params is params
        assert params.allowed_token_ids is None


def connector(made: VllmConfig, **extra: Any) -> TandemConnector:
    made.kv_transfer_config = connector_config(**extra)
    return TandemConnector(made, KVConnectorRole.SCHEDULER, cache_config((["model.layers.0.self_attn.attn"], full())))


def test_drafts_that_are_refused(draft: Path, tmp_path: Path) -> None:
    made = drafting(draft, "eagle")
    assert made.speculative_config is not None
    made.speculative_config.method = "dflash"
    with pytest.raises(ConfigurationError, match="does not support method 'dflash'"):
        connector(made)
    with pytest.raises(ConfigurationError, match=r"store: .* method 'draft_model'"):
        connector(drafting(draft), store={"path": str(tmp_path)})


def test_states_of_speculated_tokens_are_refused() -> None:
    """vLLM keeps a state for each of them, and no test says which one a transfer must fill."""
    spec = MambaSpec(block_size=BLOCK_TOKENS, shapes=((3, 64),), dtypes=(full().dtype,), num_speculative_blocks=3)
    with pytest.raises(UnsupportedCacheError, match="copied for every speculated token"):
        group_shapes(config(NGRAM), cache_config((["m"], spec)))
