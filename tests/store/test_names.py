"""Keys: equal for equal KV, different for any difference, on every host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.errors import PlanError
from connectors.planning.layout import GroupKind
from connectors.protocol.agent_metadata import ModelIdentity
from connectors.store.keys.names import Feature, PrefixChain, namespace
from connectors.store.planning.chunks import plan_store
from connectors.store.planning.layout import store_layout
from connectors.store.planning.prefix import ObjectRef
from tests.planning.builders import Shape, make_rank, with_field

IDENTITY = ("model", "dtype", "cache_dtype", "engine_version")
MODEL = ModelIdentity("weights", "torch.bfloat16", "bfloat16", "0.32.0")
SPACE = bytes(range(16))
GROUPS = ((GroupKind.SLIDING, 200, 2), (GroupKind.FULL, None, 2))
SHAPE = Shape(kv_heads=4, style="head_major", rows=16, block_tokens=16, groups=GROUPS)


def space_of(shape: Shape, tp_rank: int = 0, tp_size: int = 1, chunk_tokens: int = 256) -> bytes:
    layout = make_rank(shape, tp_rank, tp_size).layout
    plan = plan_store(layout.groups, chunk_tokens, 4096)
    return namespace(MODEL, plan, store_layout(plan, layout))


def test_a_key_is_the_same_in_every_process() -> None:
    """Objects outlive processes, so a change of keys must be deliberate, with FORMAT."""
    found = chain([1, 2, 3, 4, 5], adapter="adapter", salt="salt", features=(Feature("image", 2),))
    assert found.name(ObjectRef(4, 1)).key.hex() == "21899f5831da78bbee9b2c4d2e4db56501fbf2ab6b701ccd2615833874761551"


@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (0, 2), (1, 2), (3, 4), (2, 8), (0, 3)])
def test_namespaces_do_not_depend_on_the_tensor_parallel_size(tp_rank: int, tp_size: int) -> None:
    """Nor on blocks or strides."""
    assert space_of(SHAPE, tp_rank, tp_size) == space_of(SHAPE)
    for changes in ({"rows": 64, "block_tokens": 64}, {"style": "heads_outer"}, {"pad_bytes": 8}, {"shared": False}):
        assert space_of(replace(SHAPE, **changes), tp_rank, tp_size) == space_of(SHAPE)


def test_another_model_or_layout_has_another_namespace() -> None:
    layout = make_rank(SHAPE, 0, 1).layout
    pages = tuple(replace(each, packing="other") for each in layout.groups[1].layers)
    packed = with_field(layout, 1, layers=pages)
    plan = plan_store(layout.groups, 256, 4096)
    store = store_layout(plan, layout)
    other = [
        *(namespace(replace(MODEL, **{field: "other"}), plan, store) for field in IDENTITY),
        namespace(MODEL, plan, store_layout(plan_store(packed.groups, 256, 4096), packed)),
        space_of(SHAPE, chunk_tokens=512),
        space_of(replace(SHAPE, kv_heads=8)),
        space_of(replace(SHAPE, row_bytes=32)),
        space_of(replace(SHAPE, groups=((GroupKind.SLIDING, 190, 2), (GroupKind.FULL, None, 2)))),
        space_of(replace(SHAPE, groups=((GroupKind.SLIDING, 200, 2), (GroupKind.FULL, None, 3)))),
    ]
    assert len({space_of(SHAPE), *other}) == 1 + len(other)


def chain(
    tokens: list[int],
    space: bytes = SPACE,
    adapter: str = "",
    salt: str | None = None,
    features: tuple[Feature, ...] = (),
) -> PrefixChain:
    made = PrefixChain(space, 4, adapter, salt, features)
    made.extend(tokens)
    return made


@pytest.mark.parametrize(
    "other",
    [
        lambda: chain([9, 2, 3, 4]),
        lambda: chain([1, 2, 3, 5]),
        lambda: chain([1, 2, 3, 4], space=bytes(16)),
        lambda: chain([1, 2, 3, 4], adapter="a"),
        lambda: chain([1, 2, 3, 4], salt=""),
        lambda: chain([1, 2, 3, 4], salt="s"),
        lambda: chain([1, 2, 3, 4], adapter="s"),
        lambda: chain([1, 2, 3, 4], features=(Feature("image", 0),)),
        lambda: chain([1, 2, 3, 4], features=(Feature("image", 3),)),
        lambda: chain([1, 2, 3, 4], features=(Feature("other", 3),)),
        lambda: chain([1, 2, 3, 4], features=(Feature("image", 3), Feature("image", 3))),
    ],
)
def test_whatever_differs_changes_the_key(other: Callable[[], PrefixChain]) -> None:
    assert other().name(ObjectRef(4, 0)) != chain([1, 2, 3, 4]).name(ObjectRef(4, 0))


def test_what_comes_later_does_not_change_an_earlier_key() -> None:
    """Tokens and images after an object's end do not affect its key."""
    short = chain([1, 2, 3, 4]).name(ObjectRef(4, 0))
    assert chain([1, 2, 3, 4, 5]).name(ObjectRef(4, 0)) == short
    assert chain([1, 2, 3, 4, 5], features=(Feature("image", 4),)).name(ObjectRef(4, 0)) == short


@given(st.lists(st.integers(0, 2**31), max_size=60), st.lists(st.integers(0, 60), max_size=6), st.data())
def test_keys_do_not_depend_on_how_tokens_are_handed_over(
    tokens: list[int], offsets: list[int], data: st.DataObject
) -> None:
    """Keys do not depend on the division of tokens among calls."""
    features = [Feature(f"image {number}", offset) for number, offset in enumerate(offsets)]
    whole, parts = (PrefixChain(SPACE, 4, "", None, features) for _ in range(2))
    whole.extend(tokens)
    at = 0
    while at < len(tokens):
        count = data.draw(st.integers(1, len(tokens) - at))
        parts.extend(tokens[at : at + count])
        at += count
    for end in range(4, len(tokens) + 1, 4):
        assert whole.name(ObjectRef(end, 0)) == parts.name(ObjectRef(end, 0))


def test_negative_token_ids_are_refused() -> None:
    with pytest.raises(PlanError, match="must not be negative"):
        chain([1, -1])
