"""Layouts that the connector derives from vLLM's objects, and its refusals, by layer and name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, PretrainedConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from connectors.errors import UnsupportedCacheError
from connectors.planning.layout import GroupKind, LayerPages
from connectors.planning.plan import check_compatible
from connectors.vllm_hma.model.states import state_parts
from connectors.vllm_hma.model.translate import engine_layout, group_shapes, only_states_can_lag, total_heads
from testing.models import falcon_h1
from tests.vllm_contract.caches import (
    BLOCK_ELEMENTS,
    BLOCK_TOKENS,
    BLOCKS,
    CONTENT,
    HEADS,
    WINDOW,
    cache_config,
    full,
    sliding,
    views,
    vllm_config,
)
from tests.vllm_contract.memory_engines import MemoryRank, memory_rank

# ---- translate -----------------------------------------------------------------------------------


def test_layers_of_three_groups_on_two_tensors() -> None:
    """Layers that share memory have one region; groups keep their own kind, window and pages. The
    scheduler, which has no tensors, sees the same groups.
    """
    cache = cache_config((["s0", "s3"], sliding()), (["s1", "s4"], sliding()), (["f2", "f5"], full()))
    tensors = views(cache)
    layout = engine_layout(vllm_config(), cache, tensors, tp_rank=0)
    assert [(g.kind, g.window_tokens, g.block_tokens) for g in layout.groups] == [
        (GroupKind.SLIDING, WINDOW, BLOCK_TOKENS),
        (GroupKind.SLIDING, WINDOW, BLOCK_TOKENS),
        (GroupKind.FULL, None, BLOCK_TOKENS),
    ]
    seen, ours = (
        [(g.index, g.kind, g.block_tokens, g.window_tokens) for g in groups]
        for groups in (group_shapes(vllm_config(), cache), layout.groups)
    )
    assert seen == ours
    bases = [tensors["s0"].data_ptr(), tensors["s3"].data_ptr()]
    assert [(r.address, r.length_bytes) for r in layout.regions] == [(b, BLOCKS * BLOCK_ELEMENTS * 4) for b in bases]
    assert [[pages.address for pages in group.layers[::2]] for group in layout.groups] == [bases] * 3
    key, value = layout.groups[2].layers[2:]
    assert [(part.layer, part.heads, part.total_heads) for part in (key, value)] == [("f5", HEADS, HEADS)] * 2
    assert key.block_stride_bytes == key.page_bytes + value.page_bytes == BLOCK_ELEMENTS * 4
    assert value.address - key.address == BLOCK_TOKENS * CONTENT * 4 // 2, "a head is K, then V"
    assert [part.packing.split("/")[2] for part in (key, value)] == ["k", "v"]


def test_specs_inside_a_uniform_group() -> None:
    nested = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs={"a": full(), "b": full()})
    cache = cache_config((["a", "b"], nested))
    (group,) = engine_layout(vllm_config(), cache, views(cache), tp_rank=0).groups
    assert [pages.layer for pages in group.layers] == ["a", "a", "b", "b"]


ATTENTION: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": HEADS,
    "head_size": 32,
    "dtype": torch.float32,
}


@pytest.mark.parametrize(
    "spec",
    [
        CrossAttentionSpec(**ATTENTION),
        SinkFullAttentionSpec(**ATTENTION),
        sliding(extra_retained_tokens=1),
        SlidingWindowMLASpec(**ATTENTION | {"num_kv_heads": 1}, sliding_window=64, bounded_replay=True),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_unknown_kinds_are_refused_by_name(spec: KVCacheSpec) -> None:
    with pytest.raises(UnsupportedCacheError, match=r"layer 'odd': .*; serve this model without") as refused:
        group_shapes(vllm_config(), cache_config((["odd"], spec)))
    assert refused.value.layer == "odd"


def test_a_kernel_block_size_of_its_own() -> None:
    """Views finer than the allocator's blocks: kernel blocks with one stride, and the same
    bytes.
    """
    cache = cache_config((["f"], full()))
    split = {"f": views(cache)["f"].view(BLOCKS * 2, HEADS, BLOCK_TOKENS // 2, CONTENT)}
    layout = engine_layout(vllm_config(), cache, split, tp_rank=0)
    for part in layout.groups[0].layers:
        assert (part.kernel_blocks, part.kernel_block_stride_bytes) == (2, BLOCK_ELEMENTS * 4 // 2)
        assert part.block_stride_bytes == BLOCK_ELEMENTS * 4
    assert layout.groups[0].block_bytes == BLOCK_ELEMENTS * 4


def test_chunked_attention_is_a_kind_of_its_own() -> None:
    """A group is chunked only if the allocator frees by chunks; full attention with a chunk size
    keeps all blocks.
    """
    chunked = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)
    shapes = group_shapes(vllm_config(), cache_config((["c"], chunked), (["f"], full(attention_chunk_size=64))))
    assert [(g.kind, g.window_tokens) for g in shapes] == [(GroupKind.CHUNKED, 64), (GroupKind.FULL, None)]


def test_views_that_are_not_the_spec_are_refused() -> None:
    """Other heads or blocks than the spec's. CPU attention needs contiguous heads; otherwise its
    layout has changed.
    """
    token_major = torch.zeros(BLOCKS, BLOCK_TOKENS, HEADS, CONTENT).transpose(1, 2)
    for spec, view, told in (
        (full(num_kv_heads=2), torch.zeros(BLOCKS, HEADS, BLOCK_TOKENS, CONTENT), "2 heads or head slots.*has 4"),
        (full(), torch.zeros(12, HEADS, BLOCK_TOKENS, CONTENT), "8 blocks of 32 tokens.*12 blocks of 32"),
        (full(), token_major, "heads are not contiguous"),
    ):
        with pytest.raises(UnsupportedCacheError, match=told):
            engine_layout(vllm_config(), cache_config((["f"], spec)), {"f": view}, tp_rank=0)


STATE = MambaSpec(block_size=BLOCK_TOKENS, shapes=((3, 64), (4, 16, 16)), dtypes=(torch.float32, torch.float32))


@pytest.mark.parametrize(
    ("specs", "answer"),
    [
        ([full(), STATE, STATE], True),
        ([full(), full(), STATE], True),
        ([full(), STATE, sliding()], False),  # tokens of the window would count as cached
        # blocks of the second group may be evicted where the first's are not
        ([full(), full(head_size=64), STATE], False),
        ([full(), sliding()], False),
        ([full()], False),
    ],
)
def test_which_held_prefixes_lack_only_states(specs: list[KVCacheSpec], answer: bool) -> None:
    """vLLM may count a cached prefix without states only if nothing else of it can be missing."""
    cache = cache_config(*(([f"l{i}"], spec) for i, spec in enumerate(specs)))
    assert only_states_can_lag(cache) is answer


# ---- states --------------------------------------------------------------------------------------


STATE_BLOCKS = 5
Part = tuple[str, int, int, int, int, int]
"""(name, offset, heads here, total heads, rows, bytes of a row)."""


@pytest.fixture(autouse=True)
def layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """(channels, tokens) first; a test may reverse it. vLLM caches the value of the environment."""

    def choose(name: str) -> None:
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", name)
        get_conv_state_layout.cache_clear()

    choose("DS")
    yield choose
    get_conv_state_layout.cache_clear()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Return a Mamba-2 hybrid's configuration, TP 2, whose single group is on both ranks."""
    model = falcon_h1(tmp_path_factory.mktemp("falcon"))
    return EngineArgs(
        model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, tensor_parallel_size=2
    ).create_engine_config()


def spec(kind: Kind, shapes: tuple[tuple[int, ...], ...], **changes: object) -> MambaSpec:
    dtypes = (torch.bfloat16, torch.float32)[-len(shapes) :] if len(shapes) < 3 else (torch.float32,) * 3
    return MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, mamba_type=kind, **changes)


def page(of: MambaSpec, padding_bytes: int = 32) -> torch.Tensor:
    whole = torch.zeros(STATE_BLOCKS, of.page_size_bytes + padding_bytes, dtype=torch.int8)
    return whole[:, None, None, : of.page_size_bytes]


def parts_of(config: VllmConfig, of: MambaSpec) -> list[Part]:
    view = page(of)
    found = state_parts(config, "layer", of, view, STATE_BLOCKS)
    assert {part.block_stride_bytes for part in found} == {of.page_size_bytes + 32}
    assert sum(part.page_bytes for part in found) == of.page_size_bytes, "every byte once"
    return [described(part, view.data_ptr()) for part in found]


def described(part: LayerPages, base: int) -> Part:
    name = part.packing.rsplit("/", 1)[1]
    return name, part.address - base, part.heads, part.total_heads, part.rows, part.row_bytes


def mamba2(tp_size: int, groups: int) -> tuple[tuple[int, ...], ...]:
    return Shapes.mamba2_state_shape(
        tp_world_size=tp_size,
        intermediate_size=128,
        n_groups=groups,
        num_heads=4,
        head_dim=32,
        state_size=64,
        conv_kernel=4,
    )


@pytest.mark.parametrize(
    ("kind", "shapes", "parts"),
    [
        # x and the recurrent heads are split, B and C are complete on both ranks: 64 + 64 + 64
        # channels of three tokens.
        (
            Kind.MAMBA2,
            lambda: mamba2(2, 1),
            [
                ("x", 0, 2, 4, 1, 32 * 3 * 2),
                ("B", 64 * 3 * 2, 1, 1, 1, 64 * 3 * 2),
                ("C", 128 * 3 * 2, 1, 1, 1, 64 * 3 * 2),
                ("heads", 192 * 3 * 2, 2, 4, 1, 32 * 64 * 4),
            ],
        ),
        # Channels are split, in the convolution and in the recurrent state.
        (
            Kind.MAMBA1,
            lambda: Shapes.mamba1_state_shape(2, intermediate_size=256, state_size=16, conv_kernel=4),
            [("channels", 0, 128, 256, 1, 3 * 2), ("heads", 128 * 3 * 2, 128, 256, 1, 16 * 4)],
        ),
        # q and k are split by key heads, v by value heads: 64 + 64 + 128 channels here.
        (
            Kind.GDN_ATTN,
            lambda: Shapes.gated_delta_net_state_shape(2, 2, 4, head_k_dim=64, head_v_dim=64, conv_kernel_size=4),
            [
                ("q", 0, 1, 2, 1, 64 * 3 * 2),
                ("k", 64 * 3 * 2, 1, 2, 1, 64 * 3 * 2),
                ("v", 128 * 3 * 2, 2, 4, 1, 64 * 3 * 2),
                ("heads", 256 * 3 * 2, 2, 4, 1, 64 * 64 * 4),
            ],
        ),
        # A short convolution has no recurrent state, linear attention no convolution.
        (Kind.SHORT_CONV, lambda: Shapes.short_conv_state_shape(2, 128, 3), [("channels", 0, 64, 128, 1, 2 * 4)]),
        (Kind.LINEAR, lambda: Shapes.linear_attention_state_shape(8, 2, 16), [("heads", 0, 4, 8, 1, 16 * 16 * 4)]),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_how_states_are_split(
    config: VllmConfig, kind: Kind, shapes: Callable[[], tuple[tuple[int, ...], ...]], parts: list[Part]
) -> None:
    """vLLM's shapes depend on the layout that a fixture selects."""
    assert parts_of(config, spec(kind, shapes())) == parts


def test_mamba_2_with_a_group_for_each_rank(config: VllmConfig) -> None:
    """The shapes equal those with one group; only the model's configuration differs."""
    two = spec(Kind.MAMBA2, mamba2(2, 2))
    assert two.shapes == mamba2(2, 1)
    text = config.model_config.hf_text_config
    text.mamba_n_groups = 2
    try:
        parts = [(name, here, total) for name, _, here, total, *_ in parts_of(config, two)[:3]]
        assert parts == [("x", 2, 4), ("B", 1, 2), ("C", 1, 2)]
        text.mamba_n_groups = 7
        assert parts_of(config, two) == [("of 2 ranks", 0, 1, 2, 1, two.page_size_bytes)], "unknown: not cut"
    finally:
        text.mamba_n_groups = 1


def test_tokens_before_channels(config: VllmConfig, layout: Callable[[str], None]) -> None:
    """(tokens, channels): a section has a row for each token, with a stride of all channels."""
    layout("SD")
    of = spec(Kind.MAMBA2, mamba2(2, 1))
    view = page(of)
    x, b, c, heads = state_parts(config, "layer", of, view, STATE_BLOCKS)
    assert [part.row_stride_bytes for part in (x, b, c)] == [192 * 2] * 3
    assert [described(part, view.data_ptr())[1:] for part in (x, b, c, heads)] == [
        (0, 2, 4, 3, 32 * 2),
        (64 * 2, 1, 1, 3, 64 * 2),
        (128 * 2, 1, 1, 3, 64 * 2),
        (192 * 3 * 2, 2, 4, 1, 32 * 64 * 4),
    ]


def test_what_is_not_known_moves_whole_or_not_at_all(config: VllmConfig) -> None:
    """Three tensors: one opaque page of one of two ranks.

    A replica: one page of one. Other views are refused by layer.
    """
    three = spec(Kind.MAMBA2, ((4, 4), (4, 4), (4, 4)))
    assert parts_of(config, three) == [("of 2 ranks", 0, 1, 2, 1, 192)]
    replica = spec(Kind.MAMBA2, mamba2(2, 1), tp_replicated=True)
    assert parts_of(config, replica) == [("replicated", 0, 1, 1, 1, replica.page_size_bytes)]
    with pytest.raises(UnsupportedCacheError, match=r"layer 'layer'.*192 bytes"):
        state_parts(config, "layer", three, page(three)[:, :, :, :100], STATE_BLOCKS)


def test_a_state_group_of_a_layout(config: VllmConfig) -> None:
    """States match peers with another block size, which determines how often a state starts, not
    its bytes.
    """
    layouts = []
    for block_size in (64, 4096):
        of = MambaSpec(block_size=block_size, shapes=mamba2(2, 1), dtypes=(torch.float32,) * 2, mamba_type=Kind.MAMBA2)
        cache = cache_config((["m"], of))
        view = torch.zeros(cache.num_blocks, 1, 1, of.page_size_bytes, dtype=torch.int8)
        layouts.append(engine_layout(config, cache, {"m": view}, tp_rank=1))
    found = [(group.kind, group.block_tokens) for layout in layouts for group in layout.groups]
    assert found == [(GroupKind.STATE, 64), (GroupKind.STATE, 4096)]
    check_compatible(*layouts)


# ---- head counts ---------------------------------------------------------------------------------


LOCAL_HEADS, GLOBAL_HEADS = 4, 2
SLIDING = [f"model.layers.{i}.self_attn.attn" for i in range(5)]
FULL = "model.layers.5.self_attn.attn"


@cache
def gemma4_config(folder: Path, tp_size: int) -> VllmConfig:
    """Return the configuration of 5 sliding-window layers of 4 KV heads, and a full layer of 2."""
    sizes = {"num_attention_heads": 8, "head_dim": 32, "global_head_dim": 64}
    sizes |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "num_hidden_layers": 6}
    heads = {"num_key_value_heads": LOCAL_HEADS, "num_global_key_value_heads": GLOBAL_HEADS}
    config = Gemma4TextConfig(**sizes, **heads, attention_k_eq_v=True)
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(folder)
    made: VllmConfig = vllm_config.__wrapped__(
        model=str(folder),
        tensor_parallel_size=tp_size,
        skip_tokenizer_init=True,
        load_format="dummy",
        enable_prefix_caching=False,
        max_model_len=256,
    )
    return made


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
