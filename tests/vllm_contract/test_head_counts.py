"""Layers with different KV heads: heads of each rank, and every byte between unequal TP sizes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import Gemma4TextConfig, PretrainedConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheSpec

from connectors.errors import UnsupportedCacheError
from connectors.planning.heads import head_shares
from connectors.vllm_hma.model.translate import total_heads
from tests.vllm_contract.caches import full, sliding, vllm_config
from tests.vllm_contract.memory_engines import MemoryRank, memory_rank, transfer, whole_blocks

LOCAL_HEADS, GLOBAL_HEADS = 4, 2
SLIDING = [f"model.layers.{i}.self_attn.attn" for i in range(5)]
FULL = "model.layers.5.self_attn.attn"
TP_PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2)]


@cache
def gemma4_config(folder: Path, tp_size: int) -> VllmConfig:
    """Return vLLM's configuration of a small Gemma 4: 5 sliding-window layers of 4 KV heads, 1
    full layer of 2.
    """
    config = Gemma4TextConfig(
        num_hidden_layers=6,
        num_key_value_heads=LOCAL_HEADS,
        num_global_key_value_heads=GLOBAL_HEADS,
        attention_k_eq_v=True,
        num_attention_heads=8,
        head_dim=32,
        global_head_dim=64,
        hidden_size=64,
        intermediate_size=64,
        vocab_size=128,
    )
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(folder)
    return EngineArgs(
        model=str(folder),
        tensor_parallel_size=tp_size,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
    ).create_engine_config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma4")


def specs(tp_size: int) -> dict[str, KVCacheSpec]:
    """Return the specs of vLLM's attention layers on each rank
    (vllm/model_executor/models/gemma4.py).
    """
    local, globally = (max(1, heads // tp_size) for heads in (LOCAL_HEADS, GLOBAL_HEADS))
    found: dict[str, KVCacheSpec] = {layer: sliding(num_kv_heads=local) for layer in SLIDING}
    return found | {FULL: full(num_kv_heads=globally, head_size=64)}


def engine(folder: Path, tp_size: int) -> list[MemoryRank]:
    return [memory_rank(gemma4_config(folder, tp_size), specs(tp_size), tp_rank=rank) for rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_layer_has_its_own_number_of_heads(folder: Path, tp_size: int) -> None:
    """Gemma 4 states the full layers' heads in ``num_global_key_value_heads``; on 4 ranks they
    are replicas.
    """
    for rank in engine(folder, tp_size):
        totals = {pages.layer: pages.total_heads for group in rank.layout.groups for pages in group.layers}
        assert totals == dict.fromkeys(SLIDING, LOCAL_HEADS) | {FULL: GLOBAL_HEADS}


def test_two_ranks_send_to_four() -> None:
    """By hand: 4 local heads lie two on a producer rank, 2 global heads one; a pair of consumers
    takes each global.
    """
    assert [(s.producer_rank, s.consumer_rank, s.first) for s in head_shares(2, 4, LOCAL_HEADS)] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 2, 2),
        (1, 3, 3),
    ]
    assert [(s.producer_rank, s.consumer_rank, s.first) for s in head_shares(2, 4, GLOBAL_HEADS)] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 2, 1),
        (1, 3, 1),
    ]


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), TP_PAIRS)
def test_every_head_arrives_where_it_belongs(folder: Path, producer_tp: int, consumer_tp: int) -> None:
    """One block of each group moves; all other bytes of the consumer, padding and blocks, stay
    unchanged.
    """
    producers, consumers = engine(folder, producer_tp), engine(folder, consumer_tp)
    layers = [*SLIDING, FULL]
    # Groups share memory, so each has its own block. The groups of both engines are the same.
    blocks = {layer: 1 + number for number, layer in enumerate(layers)}
    rng = np.random.default_rng(1)
    shape = consumers[0].bytes_of(FULL).shape[2:]
    content = {FULL: rng.integers(0, 256, (GLOBAL_HEADS, *shape), np.uint8)}
    shape = consumers[0].bytes_of(SLIDING[0]).shape[2:]
    content |= {layer: rng.integers(0, 256, (LOCAL_HEADS, *shape), np.uint8) for layer in SLIDING}
    for number, producer in enumerate(producers):
        for layer, heads in content.items():
            held = len(heads) // producer_tp
            producer.bytes_of(layer)[blocks[layer]] = heads[number * held : (number + 1) * held]
    for number, consumer in enumerate(consumers):
        consumer.storage()[:] = 0xA5
        expected = memory_rank(gemma4_config(folder, consumer_tp), specs(consumer_tp), tp_rank=number)
        expected.storage()[:] = 0xA5
        for layer, heads in content.items():
            held = len(heads) // consumer_tp
            expected.bytes_of(layer)[100 + blocks[layer]] = heads[number * held : (number + 1) * held]
        moves = [
            whole_blocks(index, blocks[group.layer_names[0]], 100 + blocks[group.layer_names[0]])
            for index, group in enumerate(consumer.cache.kv_cache_groups)
        ]
        transfer(producers, consumer, moves)
        assert np.array_equal(consumer.storage(), expected.storage())


def case_config(overrides: dict[str, Any]) -> VllmConfig:
    return vllm_config(tensor_parallel_size=4, hf_overrides=frozenset(overrides.items()))


@pytest.mark.parametrize(
    ("overrides", "spec", "total"),
    [
        # MiMo-V2: num_key_value_heads counts the full layers, swa_num_key_value_heads the sliding
        # ones.
        ({"num_key_value_heads": 2, "swa_num_key_value_heads": 4}, sliding(num_kv_heads=1), 4),
        ({"num_key_value_heads": 2, "swa_num_key_value_heads": 4}, full(num_kv_heads=1), 2),
        # Without the hybrid allocator, a sliding layer keeps all blocks: a full layer with a
        # window.
        ({"num_key_value_heads": 2, "swa_num_key_value_heads": 4}, full(num_kv_heads=1, sliding_window=64), 4),
        ({"num_key_value_heads": 1}, full(num_kv_heads=1), 1),
        # Several heads on a rank are never replicas, whatever the configuration counts.
        ({"num_key_value_heads": 1}, full(num_kv_heads=2), 8),
    ],
)
def test_a_single_head_on_each_of_four_ranks(overrides: dict[str, Any], spec: KVCacheSpec, total: int) -> None:
    """One of four different heads, or a replica: only the model's configuration determines it."""
    assert total_heads(case_config(overrides), "model.layers.0.self_attn.attn", spec) == total


def nemotron_nas(config: PretrainedConfig) -> PretrainedConfig:
    """Make a Puzzle model of two blocks, the first with one KV head and the second with two."""
    config.model_type, config.num_attention_heads = "nemotron-nas", 8
    blocks = (SimpleNamespace(no_op=False, n_heads_in_group=heads) for heads in (8, 4))
    config.block_configs = [SimpleNamespace(attention=attention) for attention in blocks]
    return config


def test_a_total_that_is_unknown_or_contradicts_the_rank_is_refused(folder: Path) -> None:
    """Three heads do not fit on four ranks, and eight would put two on each. Gemma 4's layers
    differ, so a name must have the number of one of its six layers. For a Puzzle model, vLLM
    reports the first block's number of heads for all blocks.
    """
    gemma, puzzle = gemma4_config(folder, 4), vllm_config(tensor_parallel_size=4, hf_overrides=nemotron_nas)
    assert total_heads(gemma, FULL, full(num_kv_heads=1)) == GLOBAL_HEADS
    assert puzzle.model_config.model_arch_config.total_num_kv_heads == 1
    cases = [(case_config({"num_key_value_heads": heads}), "odd", f"states {heads} in total") for heads in (3, 8)]
    names = ("model.layers.self_attn.attn", "model.layers.0.experts.1.attn", "model.layers.6.attn")
    cases += [(gemma, name, "does not state their total") for name in names]
    cases.append((puzzle, "model.layers.1.self_attn.attn", "does not state their total"))
    for config, layer, told in cases:
        with pytest.raises(UnsupportedCacheError, match=f"1 KV head on each of 4 ranks.*{told}") as refused:
            total_heads(config, layer, full(num_kv_heads=1))
        assert refused.value.layer == layer
