"""The assumed prefixes in caches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policy.prefixes import ENDS_KEPT, Held, Prefixes
from actors.policy.prompts import PIECE_BYTES, passage


def size(prefixes: Prefixes) -> int:
    return sum(map(len, prefixes._caches.values()))  # noqa: SLF001


def text(letters: str, extra: int = 0):
    """Return a passage of one piece per letter, and `extra` more bytes of the last."""
    data = "".join(letter * PIECE_BYTES for letter in letters) + letters[-1] * extra
    return passage(data.encode(), ids=False, seed=0)


def held(prefixes: Prefixes, letters: str, cache: str = "d") -> int:
    """Return the whole pieces of a prompt in a cache."""
    return prefixes.held([cache], text(letters))[0].data_bytes // PIECE_BYTES


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
        prefixes.add("d", text(one, extra=100))  # the rest of a piece is not known
    assert prefixes.held("de", text(asked)) == [Held(pieces * PIECE_BYTES), Held()]


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        # The next turn begins with this prompt and decode's answer.
        (b"q" * 300 + b"answer, and the next question", 0, Held(300, 50)),
        (b"q" * 300, 0, Held(256)),  # nothing follows, so it contains no answer
        (b"q" * 299 + b"z" * 100, 0, Held(256)),
        # Prompts shorter than a piece are found, the latest answer counts, and seeds separate.
        (b"question 3, and then?", 0, Held(10, 4)),
        (b"question 4, and then?", 0, Held(10, 9)),
        (b"question 3, and then?", 1, Held()),
    ],
)
def test_answers_are_held_too(data, seed, expected):
    prefixes = Prefixes(100)
    said = [(b"q" * 300, 50), *((f"question {n}".encode(), n + 1) for n in range(5)), (b"question 4", 9)]
    for prompt, tokens in said:
        prefixes.add("d", passage(prompt, False, 0))
        prefixes.add_answer("d", passage(prompt, False, 0), tokens)
    assert prefixes.held("d", passage(data, False, seed)) == [expected]


def test_few_ends_are_kept():
    prefixes = Prefixes(100)
    ends = [passage(f"question {n}".encode(), False, 0) for n in range(ENDS_KEPT + 1)]
    for end in ends:
        prefixes.add("d", end)
        prefixes.add_answer("d", end, 5)
    nexts = [passage(f"question {n} and".encode(), False, 0) for n in range(ENDS_KEPT + 1)]
    assert [prefixes.held("d", one)[0].answer_tokens for one in nexts] == [0] + [5] * ENDS_KEPT


def test_the_oldest_goes_first_from_its_end():
    """Of five sent pieces, four have room: the older prompt loses its end, unless it is reused."""
    prefixes = Prefixes(4)
    prefixes.add("d", text("abc"))
    prefixes.add("d", text("xy"))
    assert (held(prefixes, "abc"), held(prefixes, "xy")) == (2, 2)
    prefixes.add("d", text("ab"))
    prefixes.add("d", text("z"))
    assert (held(prefixes, "ab"), held(prefixes, "xy")) == (2, 1)
    prefixes.add("d", text("kl"))
    assert (held(prefixes, "ab"), held(prefixes, "xy")) == (1, 0)
    prefixes.add("d", text("klm"), most_pieces=0)
    assert size(prefixes) == 0


def test_what_did_not_arrive_or_has_gone():
    """Pieces that were sent before are kept."""
    prefixes = Prefixes(100)
    assert len(prefixes.add("d", text("ab"))) == 2
    new = prefixes.add("d", text("abcd"))
    assert new == text("abcd").pieces[2:]
    prefixes.drop("d", new)
    prefixes.drop("nobody", new)
    assert held(prefixes, "abcd") == 2
    prefixes.add_answer("d", text("abcd"), 3)
    assert size(prefixes) == 2, "an answer to an evicted prompt is ignored"
    prefixes.add("e", text("ab"))
    prefixes.keep_only({"e"})
    assert (held(prefixes, "ab"), held(prefixes, "ab", "e"), size(prefixes)) == (0, 2, 2)


prompts = st.lists(st.sampled_from("ab"), min_size=1, max_size=6).map("".join)


@given(st.lists(st.tuples(prompts, st.sampled_from("de"), st.booleans()), max_size=30), prompts, st.integers(1, 12))
def test_bounded_and_never_more_than_was_sent(sent, asked, most):
    """Memory is bounded, no unsent piece is held, and each held piece has all pieces before it."""
    prefixes = Prefixes(most)
    for letters, cache, answered in sent:
        prefixes.add(cache, text(letters))
        if answered:
            prefixes.add_answer(cache, text(letters), 1)
    assert size(prefixes) <= 2 * most
    for cache in "de":
        begun = {letters[:count] for letters, where, _ in sent if where == cache for count in range(7)}
        assert held(prefixes, asked, cache) <= max(count for count in range(7) if count == 0 or asked[:count] in begun)
        pieces = set(prefixes._caches.get(cache, ()))  # noqa: SLF001
        for letters in {asked, *(letters for letters, _, _ in sent)}:
            known = [piece in pieces for piece in text(letters).pieces]
            assert known == sorted(known, reverse=True), "a piece is held without the pieces before it"
