"""The assumed prefix caches of engines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policy.prefixes import Held, Prefixes
from actors.policy.prompts import PIECE_BYTES, passage


def text(*letters: str, extra: int = 0):
    """Return a passage of one piece per letter, and `extra` more bytes of the last."""
    data = "".join(letter * PIECE_BYTES for letter in letters) + letters[-1] * extra
    return passage(data.encode(), ids=False, seed=0)


@pytest.mark.parametrize(
    ("sent", "asked", "pieces"),
    [
        ([], "abc", 0),
        (["abc"], "abc", 3),
        (["abc"], "abd", 2),
        (["abc"], "bbc", 0),
        (["abc"], "abcd", 3),
        (["abc"], "a", 1),
        (["ab", "acd"], "acde", 3),
        (["ab", "acd"], "abd", 2),
    ],
)
def test_the_longest_prefix_that_was_sent(sent, asked, pieces):
    prefixes = Prefixes(100)
    for one in sent:
        prefixes.add("d", text(*one))
    assert prefixes.held("d", text(*asked)) == Held(pieces * PIECE_BYTES)
    assert prefixes.held("other", text(*asked)) == Held()


def test_the_rest_of_a_piece_is_not_known():
    """Only whole pieces count, unless the prompt ended there."""
    prefixes = Prefixes(100)
    prefixes.add("d", text("a", extra=100))
    assert prefixes.held("d", text("a", extra=100)) == Held(PIECE_BYTES)


def test_the_answer_is_held_too():
    """The next turn begins with this prompt and decode's answer."""
    prefixes = Prefixes(100)
    first = passage(b"q" * 300, ids=False, seed=0)
    prefixes.add("d", first)
    prefixes.add_answer("d", first, 50)
    assert prefixes.held("d", passage(b"q" * 300 + b"answer, and the next question", False, 0)) == Held(300, 50)
    assert prefixes.held("d", first) == Held(256), "nothing follows the prompt, so it contains no answer"
    assert prefixes.held("d", passage(b"q" * 299 + b"z" * 100, False, 0)) == Held(256)


def test_answers_to_short_prompts():
    """Prompts shorter than a piece are found, even among many."""
    prefixes = Prefixes(100)
    for n in range(5):
        prompt = passage(f"question {n}".encode(), False, 0)
        prefixes.add("d", prompt)
        prefixes.add_answer("d", prompt, n + 1)
    assert prefixes.held("d", passage(b"question 3, and then?", False, 0)) == Held(10, 4)
    assert prefixes.held("d", passage(b"question 3, and then?", False, 1)) == Held(), "another adapter"


def test_the_latest_answer_counts():
    prefixes = Prefixes(100)
    prompt = text("a", extra=3)
    prefixes.add("d", prompt)
    prefixes.add_answer("d", prompt, 5)
    prefixes.add_answer("d", prompt, 9)
    assert prefixes.held("d", text("a", "a")) == Held(PIECE_BYTES + 3, 9)


def test_the_oldest_goes_first_from_its_end():
    """Of five sent pieces, four have room: the older prompt loses its end."""
    prefixes = Prefixes(4)
    prefixes.add("d", text(*"abc"))
    prefixes.add("d", text(*"xy"))
    assert prefixes.held("d", text(*"abc")) == Held(2 * PIECE_BYTES)
    assert prefixes.held("d", text(*"xy")) == Held(2 * PIECE_BYTES)
    prefixes.add("d", text(*"ab"))
    prefixes.add("d", text(*"z"))
    assert prefixes.held("d", text(*"ab")) == Held(2 * PIECE_BYTES), (
        "the piece was used again, so the other one was removed"
    )
    assert prefixes.held("d", text(*"xy")) == Held(1 * PIECE_BYTES)


def test_an_engine_that_is_gone_holds_nothing():
    prefixes = Prefixes(100)
    for engine in ("d", "e"):
        prefixes.add(engine, text(*"ab"))
    prefixes.keep_only({"e"})
    assert prefixes.held("d", text(*"ab")) == Held()
    assert prefixes.held("e", text(*"ab")) == Held(2 * PIECE_BYTES)
    assert prefixes.size() == 2


def test_what_did_not_arrive():
    """Pieces that were sent before are kept."""
    prefixes = Prefixes(100)
    assert len(prefixes.add("d", text(*"ab"))) == 2
    new = prefixes.add("d", text(*"abcd"))
    assert new == text(*"abcd").pieces[2:]
    prefixes.drop("d", new)
    prefixes.drop("nobody", new)
    assert prefixes.held("d", text(*"abcd")) == Held(2 * PIECE_BYTES)


def test_no_room_at_all():
    prefixes = Prefixes(0)
    prefixes.add("d", text(*"ab"))
    prefixes.add_answer("d", text(*"ab"), 3)
    assert prefixes.held("d", text(*"abc")) == Held()
    assert prefixes.size() == 0


prompts = st.lists(st.sampled_from("ab"), min_size=1, max_size=6)


@given(st.lists(st.tuples(prompts, st.sampled_from("de"), st.booleans()), max_size=30), prompts, st.integers(1, 12))
def test_bounded_and_never_more_than_was_sent(sent, asked, most):
    """Memory is bounded, no unsent piece is held, and each held piece has all pieces before it."""
    prefixes = Prefixes(most)
    for letters, engine, answered in sent:
        prefixes.add(engine, text(*letters))
        if answered:
            prefixes.add_answer(engine, text(*letters), 1)
    assert prefixes.size() <= 2 * most
    for engine in "de":
        held = prefixes.held(engine, text(*asked)).data_bytes // PIECE_BYTES
        common = [shared(letters, asked) for letters, where, _ in sent if where == engine]
        assert held <= max(common, default=0)
        pieces = prefixes.snapshot().get(engine, frozenset())
        known = [piece in pieces for piece in text(*asked).pieces]
        assert known == sorted(known, reverse=True), "a piece is held without the pieces before it"


def shared(first, second) -> int:
    """Return the letters with which both begin."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
