"""A call's timestamps from vLLM's statistics."""

from __future__ import annotations

import time

from vllm.v1.metrics.stats import RequestStateStats

from actors.replay_log import KvTimes, ServedCall
from actors.request import StreamChunk


def stats(queued_at: float) -> RequestStateStats:
    return RequestStateStats(queued_ts=queued_at, scheduled_ts=queued_at + 1, first_token_ts=queued_at + 3)


def test_seconds_since_the_call_came() -> None:
    """Times are relative to the call's arrival, whatever the zero of this host's clock is."""
    watch = ServedCall()
    now = time.monotonic()
    watch.computed(stats(now + 10), KvTimes((now + 11, now + 12, True), (now + 10.5, now + 10.75)))
    told = watch.take_timings()
    assert told is not None
    assert 10 <= told.queued_s < 11
    assert told.kv_asked_s == told.scheduled_s
    assert round(told.first_token_s - told.scheduled_s, 6) == 2
    assert told.kv_ended_s is not None
    assert round(told.kv_ended_s - told.kv_asked_s, 6) == 1
    assert told.kv_failed
    assert told.store_asked_s is not None
    assert told.store_ended_s is not None
    assert round(told.store_asked_s - told.queued_s, 6) == 0.5
    assert round(told.store_ended_s - told.store_asked_s, 6) == 0.25


def test_a_request_waits_from_when_it_is_handed_over() -> None:
    """vLLM's core stamps the request when it takes it from its queue, perhaps a long step later."""
    watch = ServedCall()
    watch.sent_to_engine("r")
    watch.computed(stats(time.monotonic() + 10), KvTimes())
    told = watch.take_timings()
    assert told is not None
    assert told.queued_s < 1
    assert told.scheduled_s > 10


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
