"""Prompts read from a body, to find cached prefixes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policy.prompts import MEDIA_BYTES, PIECE_BYTES, Prompt, passage, read_prompt

LONG = "x" * 600
HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "data", "ids"),
    [
        ({"prompt": "abc"}, [b"abc"], [False]),
        ({"prompt": ""}, [b""], [False]),
        ({"prompt": [1, 258]}, [bytes([1, 0, 0, 0, 2, 1, 0, 0])], [True]),
        ({"prompt": []}, [b""], [True]),
        ({"prompt": ["ab", "c"]}, [b"ab", b"c"], [False, False]),
        ({"prompt": [[1], []]}, [bytes([1, 0, 0, 0]), b""], [True, True]),
        ({"prompt": ["ab", [1]]}, [b"ab", bytes([1, 0, 0, 0])], [False, True]),
        ({"messages": [HI]}, [b"user\x1ehi\x1f"], [False]),
        ({"messages": [{"role": "user", "content": "é"}]}, ["user\x1eé\x1f".encode()], [False]),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
            [b'assistant\x1enull\x1e{"tool_calls": []}\x1f'],
            [False],
        ),
        ({"system": "s", "messages": [HI]}, [b"system\x1es\x1fuser\x1ehi\x1f"], [False]),
        ({"instructions": "s", "input": "hi"}, [b"system\x1es\x1fuser\x1ehi\x1f"], [False]),
        ({"instructions": "s", "input": [HI]}, [b"system\x1es\x1fuser\x1ehi\x1f"], [False]),
        ({"messages": [[{"role": "a", "content": "b"}], [1], 5]}, [b"a\x1eb\x1f", b"1\x1f"], [False, False]),
        ({"messages": ["hi"]}, [b'"hi"\x1f'], [False]),
        ({"prompt": "\ud800"}, [b"\xed\xa0\x80"], [False]),
        # Invalid input is no prompt, and no error.
        *(({"prompt": prompt}, [], []) for prompt in (None, 7, [1, "a"], [-1, 2], [2**32], [True, False])),
        ({}, [], []),
        ({"messages": []}, [], []),
        ({"input": []}, [], []),
    ],
)
def test_what_is_read(body, data, ids):
    passages = read_prompt(body).passages
    assert [one.data for one in passages] == data
    assert [one.ids for one in passages] == ids


@pytest.mark.parametrize(
    ("body", "answers", "most"),
    [
        ({"prompt": "a"}, 1, None),
        ({"prompt": ["a", "b"], "n": 3, "max_tokens": 5}, 6, 5),
        ({"prompt": "a", "n": "3"}, 3, None),
        ({"messages": [{}], "max_completion_tokens": 0, "max_tokens": 9}, 1, 0),
        ({"messages": [{}], "max_completion_tokens": None, "max_tokens": 9}, 1, 9),
        ({"input": "a", "max_output_tokens": 7}, 1, 7),
        ({"prompt": "a", "n": "many", "max_tokens": -1}, 1, None),
        ({}, 1, None),
    ],
)
def test_how_much_is_asked_for(body, answers, most):
    prompt = read_prompt(body)
    assert (prompt.answers, prompt.most_answer_tokens) == (answers, most)


def test_pieces_are_chained():
    """A piece's hash covers all text before it; an incomplete piece has none."""
    one, same, other = (passage(text.encode(), False, 0) for text in (LONG, LONG, "y" + LONG[1:]))
    assert len(one.pieces) == 2
    assert one.tail == b"x" * (600 - 2 * PIECE_BYTES)
    assert one.pieces == same.pieces
    assert not set(one.pieces) & set(other.pieces)


@pytest.mark.parametrize("field", ["model", "cache_salt", "tools", "chat_template", "documents"])
def test_caches_that_are_not_shared(field):
    """The same text with another adapter, salt or set of tools has another cache entry."""
    bodies = ({"prompt": LONG, **more} for more in ({}, {field: ["a"]}, {field: ["b"]}))
    assert len({read_prompt(body).passages[0].pieces for body in bodies}) == 3


texts = st.lists(st.text(max_size=700), min_size=1, max_size=4)


@given(texts, texts)
def test_a_conversations_next_turn_begins_with_this_one(said, more):
    """All pieces of this turn are the first pieces of the next."""
    chats = ([{"role": "user", "content": text} for text in turn] for turn in (said, said + more))
    first, following = (read_prompt({"messages": chat}).passages[0] for chat in chats)
    assert following.data.startswith(first.data)
    assert following.pieces[: len(first.pieces)] == first.pieces


@pytest.mark.parametrize(
    "image",
    [
        lambda data: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        lambda data: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        lambda data: {"type": "input_image", "image_url": data},
    ],
    ids=["OpenAI", "Anthropic", "responses"],
)
@pytest.mark.parametrize("field", ["messages", "input"])
def test_images_are_hashed(image, field):
    """Equal images have equal pieces, others of equal size have others from their first byte on.

    An image's bytes do not count as text.
    """
    text = {"type": "text", "text": LONG}

    def read(*content):
        return read_prompt({field: [{"role": "user", "content": list(content)}]}).passages[0]

    one, same, other = (read(text, image(data * 100_000), text) for data in ("AAAA", "AAAA", "AAAB"))
    assert one.pieces == same.pieces
    shared = sum(a == b for a, b in zip(one.pieces, other.pieces, strict=True))
    whole = len(LONG) // PIECE_BYTES
    assert whole <= shared <= whole + 1, "the text before the image, and its frame"
    assert MEDIA_BYTES < len(one.data) - len(read(text, text).data) < MEDIA_BYTES + 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
fields = st.sampled_from(["prompt", "messages", "n", "max_tokens", "max_completion_tokens", "model", "tools"])


@given(st.dictionaries(fields, json_values))
def test_no_body_is_an_error(body):
    """The engine refuses bad requests."""
    assert isinstance(read_prompt(body), Prompt)
    assert isinstance(read_prompt(json.loads(json.dumps(body))), Prompt)
