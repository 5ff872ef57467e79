"""Describe the store as a virtual engine, so that the transfer planner also plans store copies.

It has TP 1 and a dense layout with one block per object. An object may have any address in a
process, so the virtual engine begins at address 0 with blocks one byte apart: *the block id of an
object is the address of its first byte.*

An object holds its layers in order. Each layer holds its parts in order, each as (heads, stripes,
rows, bytes), so the heads of one rank are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from connectors.errors import PlanError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.planning.plan import PairPlan, plan_pair
from connectors.planning.verify import prove_plans
from connectors.store.planning.chunks import StoredGroup, StorePlan

# By default, processes on x86-64 and AArch64 have no memory above this address.
_ADDRESSES = 1 << 48


@dataclass(frozen=True, slots=True)
class RankPlans:
    store: PairPlan
    load: PairPlan


def store_layout(plan: StorePlan, layout: EngineLayout) -> EngineLayout:
    """Return the layout of the virtual engine, derived from the layout of one rank.

    ``prove_store`` compares the ranks of one engine; other results give other namespaces.
    """
    groups = tuple(
        _stored_group(number, stored, layout.groups[stored.index]) for number, stored in enumerate(plan.stored)
    )
    largest = max(group.block_bytes for group in groups)
    return EngineLayout(
        tp_rank=0,
        tp_size=1,
        num_blocks=_ADDRESSES - largest,
        regions=(Region(0, _ADDRESSES, MemoryKind("DRAM", 0)),),
        groups=groups,
    )


def stored_part(plan: StorePlan, layout: EngineLayout) -> EngineLayout:
    groups = tuple(replace(layout.groups[stored.index], index=number) for number, stored in enumerate(plan.stored))
    return replace(layout, groups=groups)


def plan_rank(plan: StorePlan, layout: EngineLayout) -> RankPlans:
    """Plan both directions for one rank, and prove that a load fills the rank's blocks.

    Raises PlanError if blocks and objects have no common units, and CoverError.
    """
    store, rank = store_layout(plan, layout), stored_part(plan, layout)
    plans = RankPlans(plan_pair(rank, store), plan_pair(store, rank))
    prove_plans(rank, [plans.load])
    return plans


def prove_store(plan: StorePlan, layouts: Sequence[EngineLayout]) -> EngineLayout:
    """Prove that an engine's ranks together write each byte of an object once.

    Return the layout of the virtual engine. Raises PlanError and CoverError.
    """
    stores = [store_layout(plan, layout) for layout in layouts]
    if any(store != stores[0] for store in stores):
        raise PlanError(
            "store: the ranks of this engine have different layouts of objects; remove store, and report this model"
        )
    prove_plans(stores[0], [plan_pair(stored_part(plan, layout), stores[0]) for layout in layouts])
    return stores[0]


def object_bytes(store: EngineLayout) -> tuple[int, ...]:
    """Payload bytes of an object of each stored group."""
    return tuple(group.block_bytes for group in store.groups)


def _stored_group(number: int, stored: StoredGroup, group: Group) -> Group:
    layers: list[LayerPages] = []
    address = 0
    for pages in group.layers:
        dense = _dense(address, stored, group, pages)
        address += dense.page_bytes
        layers.append(dense)
    tokens = 1 if stored.is_state else stored.kept_tokens
    return Group(number, group.kind, tokens, group.window_tokens, tuple(layers))


def _dense(address: int, stored: StoredGroup, group: Group, pages: LayerPages) -> LayerPages:
    rows = pages.rows if group.kind is GroupKind.STATE else stored.kept_tokens // group.row_tokens(pages)
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
