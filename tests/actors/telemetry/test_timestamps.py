"""A call's timestamps from vLLM's statistics."""

from __future__ import annotations

import time
from dataclasses import astuple, replace

from vllm.v1.metrics.stats import RequestStateStats

from actors.replay_log import KvTimes, ServedCall
from actors.request import StreamChunk


def stats(queued_at: float) -> RequestStateStats:
    return RequestStateStats(queued_ts=queued_at, scheduled_ts=queued_at + 1, first_token_ts=queued_at + 3)


def test_seconds_since_the_call_came() -> None:
    """Times are relative to the call's arrival, whatever the zero of this host's clock is.

    The wait begins with the hand-over: vLLM's core stamps the request when it takes it from its
    queue, perhaps a long step later.
    """
    now = time.monotonic()
    served = ServedCall(began_at=now)
    served.computed(stats(now + 10), KvTimes((now + 11, now + 12, True), (now + 10.5, now + 10.75)))
    told = served.take_timings()
    assert told is not None
    assert [round(each, 6) for each in astuple(replace(told, answered_s=0))] == [10, 11, 13, 0, 11, 12, 1, 10.5, 10.75]
    served = ServedCall(began_at=now)
    served.sent_to_engine("r")
    served.computed(stats(now + 10), KvTimes())
    told = served.take_timings()
    assert told is not None
    assert (told.queued_s < 5, told.scheduled_s) == (True, 11)


def test_only_the_first_token_counts_and_is_told_of_once() -> None:
    """The first chunk after the first token has the timings; earlier and later chunks have none."""
    served = ServedCall()
    assert served.chunk(b": ping\n\n") == b": ping\n\n"
    now = time.monotonic()
    served.computed(stats(now + 10), KvTimes())
    served.computed(stats(now + 99), KvTimes())
    served.record([7])
    first = served.chunk(b"a")
    assert isinstance(first, StreamChunk)
    assert first.groups == ((7,),)
    assert first.timings is not None
    assert first.timings.queued_s < 99
    assert served.chunk(b"b") == b"b"


def test_an_engine_without_statistics_tells_nothing() -> None:
    """With `disable_log_stats`, vLLM passes no statistics, or empty ones."""
    for nothing in (None, RequestStateStats()):
        watch = ServedCall()
        watch.computed(nothing, KvTimes())
        assert watch.take_timings() is None
