"""List the units to copy (``Moves``) from a request's blocks into objects, and back.

The group numbers of moves count only groups that have objects, as in ``layout.plan_rank``.

``tables[g]``       block table of KV cache group g, with or without objects
``addresses[ref]``  address in this process of the staging slot of an object
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from connectors.errors import PlanError
from connectors.planning.blocks import NULL_BLOCK, Ints, state_position, wanted_blocks
from connectors.planning.descriptors import Moves
from connectors.planning.layout import GroupKind
from connectors.planning.plan import PairPlan
from connectors.store.planning.chunks import StoredGroup, StorePlan
from connectors.store.planning.prefix import ObjectRef


def object_in_blocks(stored: StoredGroup, table: Sequence[int], ref: ObjectRef) -> bool:
    if stored.is_state:
        first = state_position(stored.group, ref.end_token)
    else:
        first = (ref.end_token - stored.kept_tokens) // stored.group.block_tokens
    ids = table[first : (ref.end_token - 1) // stored.group.block_tokens + 1]
    return len(ids) == (ref.end_token - 1) // stored.group.block_tokens + 1 - first and NULL_BLOCK not in ids


def store_moves(
    plan: StorePlan, pair: PairPlan, tables: Sequence[Sequence[int]], addresses: Mapping[ObjectRef, int]
) -> list[Moves]:
    """Copy blocks into the objects in ``addresses``; PlanError if a block has left the window."""
    moves = []
    for number, stored in enumerate(plan.stored):
        refs = sorted(ref for ref in addresses if ref.group == stored.index)
        if not refs:
            continue
        table = tables[stored.index]
        missing = next((ref for ref in refs if not object_in_blocks(stored, table, ref)), None)
        if missing is not None:
            raise PlanError(f"group {stored.index}: blocks before token {missing.end_token} are no longer allocated")
        shape = pair.groups[number].shape
        at = np.asarray([addresses[ref] for ref in refs], np.int64)
        ends = np.asarray([ref.end_token for ref in refs], np.int64)
        if stored.is_state:
            ids = np.asarray([table[state_position(stored.group, ref.end_token)] for ref in refs], np.int64)
            zeros = np.zeros_like(at)
            moves.append(Moves(number, ids, zeros, at, zeros))
            continue
        parts = np.arange(shape.dst_units, dtype=np.int64)
        units = ((ends - stored.kept_tokens) // shape.tokens)[:, None] + parts[None, :]
        ids = np.asarray(table, np.int64)[(units // shape.src_units).ravel()]
        moves.append(
            Moves(
                number,
                ids,
                (units % shape.src_units).ravel(),
                np.repeat(at, shape.dst_units),
                np.tile(parts, len(refs)),
            )
        )
    return moves


def load_moves(
    plan: StorePlan,
    pair: PairPlan,
    tables: Sequence[Sequence[int]],
    start_token: int,
    end_token: int,
    addresses: Mapping[ObjectRef, int],
    full_attention_only: bool = False,
) -> list[Moves]:
    """Return the moves that fill a request's blocks from objects, to resume at ``end_token``.

    No move writes to a block that has only tokens before ``start_token`` or, with
    ``full_attention_only``, to windows and states. Raises PlanError if a block is not allocated or
    ``addresses`` lacks a needed object.
    """
    moves: list[Moves] = []
    for number, stored in enumerate(plan.stored):
        if full_attention_only and stored.group.kind is not GroupKind.FULL:
            continue
        table, shape = tables[stored.index], pair.groups[number].shape
        blocks = wanted_blocks(stored.group, table, start_token, end_token)
        if not len(blocks):
            continue
        if stored.is_state:
            at = np.asarray([_address(addresses, ObjectRef(end_token, stored.index))], np.int64)
            zeros = np.zeros_like(at)
            moves.append(Moves(number, at, zeros, blocks.ids, zeros))
            continue
        parts = np.arange(shape.dst_units, dtype=np.int64)
        units = (blocks.positions[:, None] * shape.dst_units + parts[None, :]).ravel()
        token = units * shape.tokens
        ends = (token // plan.chunk_tokens + 1) * plan.chunk_tokens
        inside = token - (ends - stored.kept_tokens)
        # A window's first block may begin before the kept tokens: attention does not read those.
        wanted = (token < end_token) & (inside >= 0)
        at, which = _addresses(addresses, stored.index, ends[wanted])
        moves.append(
            Moves(
                number,
                at[which],
                inside[wanted] // shape.tokens,
                np.repeat(blocks.ids, shape.dst_units)[wanted],
                np.tile(parts, len(blocks))[wanted],
            )
        )
    return moves


def _addresses(addresses: Mapping[ObjectRef, int], group: int, ends: Ints) -> tuple[Ints, Ints]:
    distinct, which = np.unique(ends, return_inverse=True)
    found = [_address(addresses, ObjectRef(end, group)) for end in distinct.tolist()]
    return np.asarray(found, np.int64), which


def _address(addresses: Mapping[ObjectRef, int], ref: ObjectRef) -> int:
    if ref not in addresses:
        raise PlanError(f"group {ref.group}: the object that ends at token {ref.end_token} is missing")
    return addresses[ref]
