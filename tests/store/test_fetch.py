"""A fetch ends with the longest prefix of verified objects, whatever fails."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.store.planning.fetch import Fetch
from connectors.store.planning.prefix import ObjectRef, needed_objects, usable_prefix
from connectors.store.planning.spans import StorePlan, plan_store
from tests.store.groups import group, sliding, state

PLAN = plan_store((group(0, 16), sliding(1, 16, 100), state(2)), 128, 4096)


def refs(*pairs: tuple[int, int]) -> list[ObjectRef]:
    return [ObjectRef(end, index) for end, index in pairs]


ALL = refs(*((end, index) for end in (128, 256, 384) for index in range(3)))
NEEDED_384 = refs((128, 0), (256, 0), (384, 0), (384, 1), (384, 2))


def test_everything_is_there() -> None:
    fetch = Fetch(PLAN, 0, 500)
    assert set(fetch.candidates) == set(ALL)
    assert fetch.next_reads() == []
    fetch.found(ALL, ())
    assert fetch.next_reads() == sorted(NEEDED_384)
    assert fetch.next_reads() == [], "each object is read once"
    for ref in NEEDED_384:
        assert not fetch.settled
        assert fetch.read(ref)
    assert fetch.settled
    assert fetch.end_token == 384


def test_a_corrupt_state_costs_one_chunk() -> None:
    """The fetch falls back to the earlier state, and reads the missing objects for it."""
    fetch = Fetch(PLAN, 0, 500)
    fetch.found(ALL, ())
    fetch.next_reads()
    for ref in NEEDED_384[:4]:
        fetch.read(ref)
    fetch.failed(ObjectRef(384, 2))
    assert fetch.end_token == 256
    assert fetch.next_reads() == refs((256, 1), (256, 2))
    fetch.read(ObjectRef(256, 1))
    fetch.read(ObjectRef(256, 2))
    assert fetch.settled
    assert set(fetch.needed) <= fetch.verified


def test_a_late_object_costs_what_depends_on_it() -> None:
    fetch = Fetch(PLAN, 0, 500)
    fetch.found(ALL, ())
    fetch.next_reads()
    for ref in NEEDED_384[1:]:
        fetch.read(ref)
    fetch.give_up()
    assert fetch.settled
    assert fetch.end_token == 0, "the first 128 tokens of full attention are missing"
    assert not fetch.read(ObjectRef(128, 0)), "the object arrives too late"


def test_tokens_of_the_engine_itself_are_not_read() -> None:
    fetch = Fetch(PLAN, 256, 500)
    fetch.found(fetch.candidates, ())
    assert fetch.next_reads() == refs((384, 0), (384, 1), (384, 2))


def test_beside_a_transfer_only_full_attention_is_read() -> None:
    """The transfer brings the window and the state of the prompt's end."""
    fetch = Fetch(PLAN.full_attention, 0, 500)
    assert fetch.candidates == tuple(refs((128, 0), (256, 0), (384, 0)))
    fetch.found(refs((128, 0), (256, 0)), refs((384, 0)))
    assert fetch.next_reads() == refs((128, 0), (256, 0))
    fetch.read(ObjectRef(128, 0))
    fetch.give_up()
    assert fetch.end_token == 128, "what has been read in time is used"


def test_a_lookup_without_answer_is_a_miss() -> None:
    fetch = Fetch(PLAN, 0, 500)
    fetch.found(refs((128, 0), (128, 1), (128, 2)), ())
    assert not fetch.settled
    fetch.stop_looking()
    assert fetch.end_token == 128


def test_too_short_a_prompt_is_settled_at_once() -> None:
    fetch = Fetch(PLAN, 0, 127)
    assert fetch.candidates == ()
    assert fetch.settled
    assert fetch.end_token == 0


def test_reads_that_do_not_fit_into_memory_are_not_started() -> None:
    """An object of full attention has 10 bytes, a window 2, a state 1."""
    fetch = Fetch(PLAN, 0, 500)
    fetch.found(ALL, ())
    assert not fetch.fit({0: 10, 1: 2, 2: 1}, 33)
    assert fetch.end_token == 384
    assert fetch.fit({0: 10, 1: 2, 2: 1}, 32)
    assert fetch.end_token == 256
    assert fetch.next_reads() == refs((128, 0), (256, 0), (256, 1), (256, 2))
    assert not fetch.fit({0: 10, 1: 2, 2: 1}, 0), "all of it is being read"
    fetch.failed(ObjectRef(256, 2))
    assert fetch.fit({0: 10, 1: 2, 2: 1}, 2)
    assert fetch.end_token == 0
    assert fetch.limit_token == 500


PLANS = (
    PLAN,
    plan_store((group(0, 16), group(1, 16)), 128, 4096),
    plan_store((group(0, 96, row_tokens=96), sliding(1, 16, 300)), 64, 4096),
    plan_store((state(0), group(1, 1056, row_tokens=1056)), 256, 4096),
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PLANS), st.integers(0, 1500), st.integers(0, 1), st.data())
def test_whatever_fails_the_end_rests_on_verified_objects(
    plan: StorePlan, tokens: int, start_blocks: int, data: st.DataObject
) -> None:
    """The end is that of the longest prefix of objects that did not fail."""
    start = min(start_blocks * 192, tokens)
    fetch = Fetch(plan, start, tokens)
    present = {ref for ref in fetch.candidates if data.draw(st.integers(0, 5))}
    broken = {ref for ref in present if not data.draw(st.integers(0, 5))}
    fetch.found(present, set(fetch.candidates) - present)
    while reads := fetch.next_reads():
        for ref in reads:
            if ref in broken:
                fetch.failed(ref)
            else:
                fetch.read(ref)
    assert fetch.settled
    assert fetch.verified >= set(needed_objects(plan, start, fetch.end_token))
    assert start <= fetch.end_token <= max(start, tokens)
    assert fetch.end_token == usable_prefix(plan, present - broken, start, tokens)
