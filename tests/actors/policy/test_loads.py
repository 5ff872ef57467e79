"""Queued work of an engine, and the measured time of finished work."""

import pytest

from actors.policy.loads import EngineLoad, PromptQueue


def test_an_idle_engine():
    assert PromptQueue().wait_s(5.0) == 0.0


@pytest.mark.parametrize(
    ("now", "wait_s"),
    [
        (10.0, 5.0),  # 2 + 3
        (11.5, 3.5),  # three quarters of the first are done
        (12.0, 3.2),  # it should be done: a tenth of its age is still expected
        (110.0, 13.0),  # it hangs
    ],
)
def test_who_comes_waits_for_the_rest(now, wait_s):
    queue = PromptQueue()
    queue.add(1, (1.0,), 2.0, 10.0)
    queue.add(2, (1.0,), 3.0, 10.0)
    assert queue.wait_s(now) == pytest.approx(wait_s)


def test_time_counts_from_the_work_before():
    """An engine computes prompts in turn: the second took 4 s, although both arrived together."""
    queue = PromptQueue()
    queue.add(1, (1.0,), 2.0, 10.0)
    queue.add(2, (5.0,), 3.0, 10.0)
    assert queue.finish(1, 13.0) == ((1.0,), 3.0)
    assert queue.finish(2, 17.0, (6.0,)) == ((6.0,), 4.0)
    queue.add(3, (1.0,), 1.0, 30.0)
    assert queue.finish(3, 31.0) == ((1.0,), 1.0), "idle time counts for no work"


def test_work_that_was_computed_together():
    """Two prompts in one step end at once: the second is counted with the next that ends."""
    queue = PromptQueue()
    for key in (1, 2, 3):
        queue.add(key, (1.0,), 2.0, 10.0)
    assert queue.finish(1, 12.0) == ((1.0,), 2.0)
    assert queue.finish(2, 12.1) is None
    assert queue.finish(3, 14.0) == ((2.0,), 2.0)


def test_work_that_overtook():
    """The time since then is not its own: it is counted with the work that it overtook."""
    queue = PromptQueue()
    queue.add(1, (1.0,), 2.0, 10.0)
    queue.add(2, (1.0,), 2.0, 10.0)
    assert queue.finish(2, 13.0) is None
    assert queue.finish(1, 14.0) == ((2.0,), 4.0)


def test_nothing_is_learnt_from_what_did_not_end():
    queue = PromptQueue()
    queue.add(1, (1.0,), 2.0, 10.0)
    queue.add(2, (1.0,), 2.0, 10.0)
    queue.drop(1, 11.0)
    queue.drop(7, 11.0)
    assert queue.finish(1, 12.0) is None
    assert queue.wait_s(12.0) == 1.0
    assert queue.finish(2, 13.0) == ((1.0,), 2.0)
    assert len(queue) == 0


def test_streams_over_time():
    """One stream for 2 s, then two for 3 s, then none."""
    load = EngineLoad()
    load.streams_begin(1, 10.0)
    load.streams_begin(2, 12.0)
    assert load.stream_seconds(15.0) == 2 + 6
    load.streams_end(1, 15.0)
    load.streams_end(2, 15.0)
    assert load.stream_seconds(99.0) == 8
