"""The record of a stream from which another engine continues it."""

from __future__ import annotations

import sys

from actors.replay_log import RecordedGroups


def test_groups_keep_their_bounds() -> None:
    """Empty groups and those of several chunks keep their bounds; token ids have up to 32 bits."""
    recorded = RecordedGroups()
    recorded.extend(((1, 2), ()))
    recorded.extend(((2**32 - 1,),))
    assert (len(recorded), recorded.replay_log()) == (3, ((1, 2), (), (2**32 - 1,)))
    recorded.clear()
    assert (len(recorded), recorded.replay_log()) == (0, ())


def test_a_long_stream_is_small() -> None:
    """A group of one token takes 8 bytes and the arrays' reserve; a tuple takes 64 and more."""
    recorded = RecordedGroups()
    recorded.extend([(number,) for number in range(100_000)])
    assert sys.getsizeof(recorded._tokens) + sys.getsizeof(recorded._sizes) < 1_000_000  # noqa: SLF001
