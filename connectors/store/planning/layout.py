"""The store as a virtual engine: TP 1, dense, one block an object. Existing plans then move bytes in both directions.

``plan_pair(rank, store)`` says what a rank writes into objects, ``plan_pair(store, rank)`` what it reads from them,
whatever its TP size, block size and strides; ``prove_plans`` proves both.

An object may lie anywhere in a process's memory. The virtual engine therefore begins at address 0 with blocks one byte
apart: *the block id of an object is the address of its first byte.*

Within an object the layers follow each other, and within a layer its parts, each as (heads, stripes, rows, bytes), so
that the heads of one rank lie together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from connectors.errors import PlanError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.planning.plan import PairPlan, plan_pair
from connectors.planning.verify import prove_plans
from connectors.store.planning.spans import GroupSpans, StorePlan

# No process has memory above this address on x86-64 or AArch64.
_ADDRESSES = 1 << 48


@dataclass(frozen=True, slots=True)
class RankPlans:
    """How one rank's cache is copied into objects (``store``) and from them (``load``), groups in the plan's order."""

    store: PairPlan
    load: PairPlan


def store_layout(plan: StorePlan, layout: EngineLayout) -> EngineLayout:
    """The virtual engine for objects of the model that ``layout`` caches; the same whatever rank's layout is given."""
    groups = tuple(
        _stored_group(number, spans, layout.groups[spans.index]) for number, spans in enumerate(stored_groups(plan))
    )
    largest = max(group.block_bytes for group in groups)
    return EngineLayout(
        tp_rank=0,
        tp_size=1,
        num_blocks=_ADDRESSES - largest,
        regions=(Region(0, _ADDRESSES, MemoryKind("DRAM", 0)),),
        groups=groups,
    )


def stored_groups(plan: StorePlan) -> tuple[GroupSpans, ...]:
    """The groups that have objects. Plans and virtual layouts have these only."""
    return tuple(spans for spans in plan.groups if spans.stored)


def stored_part(plan: StorePlan, layout: EngineLayout) -> EngineLayout:
    """A rank's layout without the groups that have no objects, renumbered as ``store_layout`` numbers them."""
    groups = tuple(
        replace(layout.groups[spans.index], index=number) for number, spans in enumerate(stored_groups(plan))
    )
    return replace(layout, groups=groups)


def plan_rank(plan: StorePlan, layout: EngineLayout) -> RankPlans:
    """Plan both directions for one rank, and prove that a load fills its blocks. Raises PlanError, CoverError.

    That all ranks together fill an object is proved by ``prove_store``, where their layouts meet.
    """
    store, rank = store_layout(plan, layout), stored_part(plan, layout)
    plans = RankPlans(plan_pair(rank, store), plan_pair(store, rank))
    prove_plans(rank, [plans.load])
    return plans


def prove_store(plan: StorePlan, layouts: Sequence[EngineLayout]) -> EngineLayout:
    """Prove that the ranks of an engine together write each byte of an object once; return the virtual layout."""
    stores = [store_layout(plan, layout) for layout in layouts]
    if any(store != stores[0] for store in stores):
        raise PlanError("the ranks of this engine would store objects of different shapes")
    prove_plans(stores[0], [plan_pair(stored_part(plan, layout), stores[0]) for layout in layouts])
    return stores[0]


def object_bytes(store: EngineLayout) -> tuple[int, ...]:
    """Payload of one object, by stored group."""
    return tuple(group.block_bytes for group in store.groups)


def _stored_group(number: int, spans: GroupSpans, group: Group) -> Group:
    layers: list[LayerPages] = []
    address = 0
    for pages in group.layers:
        dense = _dense(address, spans, group, pages)
        address += dense.page_bytes
        layers.append(dense)
    tokens = 1 if spans.is_state else spans.kept_tokens
    return Group(number, group.kind, tokens, group.window_tokens, tuple(layers))


def _dense(address: int, spans: GroupSpans, group: Group, pages: LayerPages) -> LayerPages:
    rows = pages.rows if group.kind is GroupKind.STATE else spans.kept_tokens // group.row_tokens(pages)
    stripe = rows * pages.row_bytes
    return LayerPages(
        layer=pages.layer,
        address=address,
        block_stride_bytes=1,
        total_heads=pages.total_heads,
        heads=pages.total_heads,
        head_stride_bytes=pages.stripes * stripe,
        rows=rows,
        row_stride_bytes=pages.row_bytes,
        row_bytes=pages.row_bytes,
        packing=pages.packing,
        stripes=pages.stripes,
        stripe_stride_bytes=stripe if pages.stripes > 1 else 0,
    )
