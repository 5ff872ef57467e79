"""Objects of chunks: tables computed by hand, and every configuration error."""

from __future__ import annotations

import pytest

from connectors.errors import ConfigurationError
from connectors.planning.layout import Group, GroupKind
from connectors.store.planning.chunks import plan_store
from connectors.store.planning.prefix import ObjectRef, completed_objects, needed_objects, usable_prefix
from tests.store.groups import chunked, group, sliding, state


def test_windows_shorter_than_a_chunk_keep_the_end_of_it() -> None:
    """gpt-oss: a window of 128 beside full attention, chunks of 512.

    Attention at 512 sees tokens 385 to 511.
    """
    plan = plan_store((sliding(0, 16, 128), group(1, 16)), 512, 4096)
    assert [each.kept_tokens for each in plan.groups] == [128, 512]
    # Only the last window is needed to resume, and all of full attention.
    assert needed_objects(plan, 0, 1536) == [
        ObjectRef(512, 1),
        ObjectRef(1024, 1),
        ObjectRef(1536, 0),
        ObjectRef(1536, 1),
    ]
    present = {*completed_objects(plan, 0, 1536)}
    assert usable_prefix(plan, present, 0, 2000) == 1536
    assert usable_prefix(plan, present - {ObjectRef(1536, 0)}, 0, 2000) == 1024
    assert usable_prefix(plan, present - {ObjectRef(512, 1)}, 0, 2000) == 0
    # The engine's own cache may have full attention's first 512 tokens.
    assert usable_prefix(plan, present - {ObjectRef(512, 1)}, 512, 2000) == 1536


@pytest.mark.parametrize(
    ("window_tokens", "chunk_tokens", "kept"),
    [
        (1, 256, 0),
        (2, 256, 1),
        (8, 256, 8),
        (100, 256, 128),
        (129, 256, 128),
        (130, 256, 256),
        (257, 256, 256),
        (4096, 256, 256),
        (64, 64, 64),
    ],
)
def test_tokens_kept_for_a_sliding_window(window_tokens: int, chunk_tokens: int, kept: int) -> None:
    """window - 1 tokens before the next one, rounded up to a power of two, at most the chunk."""
    plan = plan_store((sliding(0, 16, window_tokens), group(1, 16)), chunk_tokens, 8192)
    assert plan.groups[0].kept_tokens == kept
    assert plan.groups[0].stored == (kept > 0)


def test_windows_of_packed_rows_keep_whole_rows() -> None:
    odd = group(0, 48, GroupKind.SLIDING, 40, row_tokens=48)
    assert plan_store((odd,), 192, 4096).groups[0].kept_tokens == 96


def test_windows_longer_than_a_chunk_need_several_objects() -> None:
    """A window of 600 at token 1,024 begins at 425, in the block of 16 that begins at 416."""
    plan = plan_store((sliding(0, 16, 600),), 256, 4096)
    assert needed_objects(plan, 0, 1024) == [ObjectRef(512, 0), ObjectRef(768, 0), ObjectRef(1024, 0)]
    # With blocks of 256 the window's first block begins at 256: no change. With 512 it begins at 0.
    assert needed_objects(plan_store((sliding(0, 512, 600),), 256, 4096), 0, 1024) == [
        ObjectRef(end, 0) for end in (256, 512, 768, 1024)
    ]


def test_chunked_attention() -> None:
    """llama4: attention reaches back to the beginning of its own chunk of 1,024 tokens."""
    plan = plan_store((chunked(0, 16, 1024), group(1, 16)), 256, 8192)
    assert [ref for ref in needed_objects(plan, 0, 1536) if ref.group == 0] == [ObjectRef(1280, 0), ObjectRef(1536, 0)]
    assert [ref for ref in needed_objects(plan, 0, 2048) if ref.group == 0] == []
    # If each end of a stored chunk ends an attention chunk, nothing of the group is ever stored.
    assert not plan_store((chunked(0, 16, 256), group(1, 16)), 512, 8192).groups[0].stored


def test_states_without_a_boundary_at_a_chunk_store_nothing() -> None:
    plan = plan_store((state(0), group(1, 16)), 256, 4096)
    assert completed_objects(plan, 0, 300) == [ObjectRef(256, 1)]
    assert completed_objects(plan, 0, 256) == [ObjectRef(256, 0), ObjectRef(256, 1)]
    assert completed_objects(plan, 256, 256) == []


FULL = (group(0, 16),)


@pytest.mark.parametrize(
    ("groups", "chunk_tokens", "max_model_len", "message"),
    [
        ((), 256, 4096, "no KV cache groups"),
        ((chunked(0, 16, 256),), 512, 4096, "multiples of 512"),
        (FULL, 256, 256, "max_model_len of at least 257"),
        # A kernel that packs a whole block of 1,056 tokens, beside a state: Mamba on accelerators.
        ((group(0, 1056, row_tokens=1056), state(1)), 256, 4096, "chunk_tokens must be a multiple of 1056"),
        ((sliding(0, 96, 128),), 768, 4096, "divisor of 128, or chunk_tokens to at most 128"),
    ],
)
def test_configuration_errors(groups: tuple[Group, ...], chunk_tokens: int, max_model_len: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_store(groups, chunk_tokens, max_model_len)
