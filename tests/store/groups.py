"""Groups for the store's tests: shapes without memory, as the scheduler knows them."""

from __future__ import annotations

from connectors.planning.layout import Group, GroupKind, LayerPages


def page(rows: int, layer: str = "layer") -> LayerPages:
    """A layer whose block is cut into ``rows`` rows."""
    return LayerPages(layer, 0, rows * 8, 1, 1, rows * 8, rows, 8, 8, "rows")


def group(
    index: int,
    block_tokens: int,
    kind: GroupKind = GroupKind.FULL,
    window_tokens: int | None = None,
    row_tokens: int = 1,
) -> Group:
    """One layer, whose kernel packs ``row_tokens`` tokens together."""
    rows = 1 if kind is GroupKind.STATE else block_tokens // row_tokens
    return Group(index, kind, block_tokens, window_tokens, (page(rows, f"layers.{index}"),))


def sliding(index: int, block_tokens: int, window_tokens: int) -> Group:
    return group(index, block_tokens, GroupKind.SLIDING, window_tokens)


def chunked(index: int, block_tokens: int, window_tokens: int) -> Group:
    return group(index, block_tokens, GroupKind.CHUNKED, window_tokens)


def state(index: int, block_tokens: int = 4096) -> Group:
    return group(index, block_tokens, GroupKind.STATE)
