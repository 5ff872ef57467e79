"""Free the staging slots of writes, and of reads that outlast their fetch, once the calls end.

Until a call ends, a thread of a tier may access its slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from connectors.store.tiers.lanes import Lane, LaneCall
from connectors.store.tiers.staging import Staging


@dataclass(frozen=True, slots=True)
class _SlotCall:
    lane: Lane
    call: LaneCall[Any]
    offset: int
    ended: Callable[[], None] | None


class SlotCalls:
    """Calls that are users of slots of ``staging`` (``Staging.share``)."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._calls: list[_SlotCall] = []

    @property
    def pending(self) -> int:
        """Number of calls that ``sweep`` has not found to be over."""
        return len(self._calls)

    def add(self, lane: Lane, call: LaneCall[Any], offset: int, ended: Callable[[], None] | None = None) -> None:
        """Add a call that uses the slot at ``offset``.

        ``lane``   lane of the call
        ``ended``  called by ``sweep`` once the call is over
        """
        self._calls.append(_SlotCall(lane, call, offset, ended))

    def sweep(self) -> None:
        """Give back the slots of calls that are over. Cancel queued calls past their deadline."""
        kept, now = [], time.monotonic()
        for each in self._calls:
            if each.call.deadline <= now:
                # If all threads of a lane hang, no thread takes a queued call and fails it.
                each.lane.cancel(each.call)
            if not each.call.over:
                kept.append(each)
                continue
            self._staging.give_back(each.offset)
            if each.ended is not None:
                each.ended()
        self._calls = kept
