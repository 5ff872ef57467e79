"""Layout of a state's page, computed by hand from vLLM's shapes, for every kind that is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import MambaSpec

from connectors.errors import UnsupportedCacheError
from connectors.planning.layout import GroupKind, LayerPages
from connectors.planning.plan import check_compatible
from connectors.vllm_hma.model.states import state_parts
from connectors.vllm_hma.model.translate import engine_layout
from testing.models import falcon_h1
from tests.vllm_contract.caches import cache_config

BLOCKS = 5
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
    """Return a view (blocks, 1, 1, bytes) with padded pages."""
    whole = torch.zeros(BLOCKS, of.page_size_bytes + padding_bytes, dtype=torch.int8)
    return whole[:, None, None, : of.page_size_bytes]


def parts_of(config: VllmConfig, of: MambaSpec) -> list[Part]:
    view = page(of)
    found = state_parts(config, "layer", of, view, BLOCKS)
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
        assert [(name, here, total) for name, _, here, total, *_ in parts_of(config, two)[:3]] == [
            ("x", 2, 4),
            ("B", 1, 2),
            ("C", 1, 2),
        ]
        text.mamba_n_groups = 7
        assert parts_of(config, two) == [("of 2 ranks", 0, 1, 2, 1, two.page_size_bytes)], "unknown: not cut"
    finally:
        text.mamba_n_groups = 1


def test_tokens_before_channels(config: VllmConfig, layout: Callable[[str], None]) -> None:
    """(tokens, channels): a section has a row for each token, with a stride of all channels."""
    layout("SD")
    of = spec(Kind.MAMBA2, mamba2(2, 1))
    view = page(of)
    x, b, c, heads = state_parts(config, "layer", of, view, BLOCKS)
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
    with pytest.raises(UnsupportedCacheError, match="layer 'layer': its states have 192 bytes, but vLLM's view is"):
        state_parts(config, "layer", three, page(three)[:, :, :, :100], BLOCKS)


def test_a_state_group_of_a_layout(config: VllmConfig, tmp_path: Path) -> None:
    """States match peers with another block size, which determines how often a state starts, not
    its bytes.
    """
    layouts = []
    for block_size in (64, 4096):
        of = MambaSpec(block_size=block_size, shapes=mamba2(2, 1), dtypes=(torch.float32,) * 2, mamba_type=Kind.MAMBA2)
        cache = cache_config((["m"], of))
        view = torch.zeros(cache.num_blocks, 1, 1, of.page_size_bytes, dtype=torch.int8)
        layouts.append(engine_layout(config, cache, {"m": view}, tp_rank=1))
    assert [(group.kind, group.block_tokens) for layout in layouts for group in layout.groups] == [
        (GroupKind.STATE, 64),
        (GroupKind.STATE, 4096),
    ]
    check_compatible(*layouts)
