"""Queued work of an engine, and the measured time of finished work."""

import pytest

from actors.policy.loads import EngineLoad, PromptQueue


@pytest.mark.parametrize(
    ("now", "wait_s"),
    [
        (10.0, 5.0),  # 2 + 3
        (11.5, 3.5),  # three quarters of the first are done
        (12.0, 3.2),  # it should be done: a tenth of its age is still expected
        (110.0, 13.0),  # it hangs
    ],
)
def test_a_new_prompt_waits_for_the_rest(now, wait_s):
    queue = PromptQueue()
    assert queue.wait_s(now) == 0.0
    queue.add(1, (1.0,), 2.0, 10.0)
    queue.add(2, (1.0,), 3.0, 10.0)
    assert queue.wait_s(now) == pytest.approx(wait_s)


@pytest.mark.parametrize(
    "ends",
    [
        # An engine computes prompts in turn, and idle time counts for no work.
        [(1, 13.0, ((1.0,), 3.0)), (2, 17.0, ((1.0,), 4.0)), (3, 18.0, ((1.0,), 1.0))],
        # Two prompts in one step end at once: the second is counted with the next that ends.
        [(1, 12.0, ((1.0,), 2.0)), (2, 12.1, None), (3, 14.0, ((2.0,), 2.0))],
        # One that overtakes is counted with the work that it overtook.
        [(2, 13.0, None), (1, 14.0, ((2.0,), 4.0)), (3, 16.0, ((1.0,), 2.0))],
        # Dropped work and unknown keys make no measurement, and time counts from the drop.
        [(1, 11.0, "dropped"), (7, 11.0, "dropped"), (1, 12.0, None), (2, 13.0, ((1.0,), 2.0))],
        [(2, 11.0, "dropped"), (1, 12.0, ((1.0,), 2.0))],
        # No time has passed.
        [(1, 10.0, None), (2, 10.0, None), (3, 10.0, None)],
    ],
)
def test_what_is_measured(ends):
    queue = PromptQueue()
    for key in (1, 2, 3):
        queue.add(key, (1.0,), 2.0, 10.0)
    for key, now, measured in ends:
        if measured == "dropped":
            queue.drop(key, now)
        else:
            assert queue.finish(key, now) == measured
    if len(queue) == 0:
        assert queue.wait_s(99.0) == 0.0
        queue.add(4, (1.0,), 1.0, 30.0)
        assert queue.finish(4, 31.0, (5.0,)) == ((5.0,), 1.0), "idle time counts for no work"


def test_streams_over_time():
    """One stream for 2 s, then two for 3 s, then none."""
    load = EngineLoad()
    load.streams_begin(1, 10.0)
    load.streams_begin(2, 12.0)
    assert load.stream_seconds(15.0) == 2 + 6
    load.streams_end(1, 15.0)
    load.streams_end(2, 15.0)
    assert load.stream_seconds(99.0) == 8
