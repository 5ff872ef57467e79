"""Layouts that ``translate.py`` derives from vLLM's objects, and its refusals, by layer and
name.
"""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from connectors.errors import UnsupportedCacheError
from connectors.planning.layout import GroupKind
from connectors.vllm_hma.model.translate import engine_layout, group_shapes, only_states_can_lag
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


def test_layers_of_three_groups_on_two_tensors() -> None:
    """Layers that share memory have one region; groups keep their own kind, window and pages."""
    cache = cache_config((["s0", "s3"], sliding()), (["s1", "s4"], sliding()), (["f2", "f5"], full()))
    tensors = views(cache)
    layout = engine_layout(vllm_config(), cache, tensors, tp_rank=0)
    assert [(g.kind, g.window_tokens, g.block_tokens) for g in layout.groups] == [
        (GroupKind.SLIDING, WINDOW, BLOCK_TOKENS),
        (GroupKind.SLIDING, WINDOW, BLOCK_TOKENS),
        (GroupKind.FULL, None, BLOCK_TOKENS),
    ]
    bases = [tensors["s0"].data_ptr(), tensors["s3"].data_ptr()]
    assert [(r.address, r.length_bytes) for r in layout.regions] == [(b, BLOCKS * BLOCK_ELEMENTS * 4) for b in bases]
    assert [[pages.address for pages in group.layers[::2]] for group in layout.groups] == [bases] * 3
    key, value = layout.groups[2].layers[2:]
    assert [(part.layer, part.heads, part.total_heads) for part in (key, value)] == [("f5", HEADS, HEADS)] * 2
    assert key.block_stride_bytes == key.page_bytes + value.page_bytes == BLOCK_ELEMENTS * 4
    assert value.address - key.address == BLOCK_TOKENS * CONTENT * 4 // 2, "a head is K, then V"
    assert [part.packing.split("/")[2] for part in (key, value)] == ["k", "v"]


def test_the_scheduler_sees_the_same_groups() -> None:
    """Both sides agree on kind, window and block size, though the scheduler has no tensors."""
    cache = cache_config((["s0"], sliding()), (["f2"], full()))
    layout = engine_layout(vllm_config(), cache, views(cache), tp_rank=0)
    seen = [(g.index, g.kind, g.block_tokens, g.window_tokens) for g in group_shapes(vllm_config(), cache)]
    assert seen == [(g.index, g.kind, g.block_tokens, g.window_tokens) for g in layout.groups]


def test_specs_inside_a_uniform_group() -> None:
    """Layers whose specs are nested in one UniformTypeKVCacheSpecs are read one by one."""
    nested = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs={"a": full(), "b": full()})
    cache = cache_config((["a", "b"], nested))
    (group,) = engine_layout(vllm_config(), cache, views(cache), tp_rank=0).groups
    assert [pages.layer for pages in group.layers] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    "spec",
    [
        CrossAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=32, dtype=torch.float32),
        SinkFullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=32, dtype=torch.float32),
        sliding(extra_retained_tokens=1),
        SlidingWindowMLASpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=1,
            head_size=64,
            dtype=torch.float32,
            sliding_window=64,
            bounded_replay=True,
        ),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_unknown_kinds_are_refused_by_name(spec: KVCacheSpec) -> None:
    """The error names the layer, its unsupported property, and a remedy; subclasses of known
    specs are refused as well.
    """
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


def test_mla_is_one_head_on_every_rank() -> None:
    """The rows of an MLA cache are tokens; its single latent is a replica in any position."""
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    layout = engine_layout(vllm_config(), cache_config((["m"], spec)), {"m": torch.zeros(BLOCKS, 1, 16, 576)}, 0)
    (pages,) = layout.groups[0].layers
    assert (layout.groups[0].kind, pages.total_heads, pages.heads) == (GroupKind.FULL, 1, 1)
    assert (pages.rows, pages.row_bytes, layout.groups[0].row_tokens(pages)) == (16, 576 * 4, 1)


def test_chunked_attention_is_a_kind_of_its_own() -> None:
    """A group is chunked only if the allocator frees by chunks; full attention with a chunk size
    keeps all blocks.
    """
    chunked = ChunkedLocalAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=32, dtype=torch.float32, attention_chunk_size=64
    )
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
