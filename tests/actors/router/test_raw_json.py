"""The legs' bodies: both engines receive the client's JSON, except for the fields that make a
leg.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.large_json import as_written, write

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def test_values_are_passed_on_as_they_were_written() -> None:
    """No digit or escape of a kept field changes; set fields are set, and removed ones are
    absent.
    """
    raw = rb'{"prompt" : "\u00e4\n\/",  "temperature":0.10, "seed": 1e2, "n":1,"stop":[ "x" ]}'
    fields = as_written(raw)
    del fields["stop"]
    assert write(fields | {"n": 2, "x": {"transfer_id": "t"}}) == (
        rb'{"prompt":"\u00e4\n\/","temperature":0.10,"seed":1e2,"n":2,"x":{"transfer_id":"t"}}'
    )


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": NaN, "b": -Infinity}',
        rb'{"a": "\ud800", "b": 1}',
        rb'{"\ud800": 1, "b": 2}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"\xed\xa0\x80": 1, "b": 2}',
        b'{"a": 1, "a": 2}',
        b'{"a": 123456789012345678901234567890, "b": 1e999}',
        '{"a": "ä"}'.encode("utf-16"),
        '{"a": "ä"}'.encode("utf-32"),
        b'\xef\xbb\xbf{"a": 1}',
        b' \n{ "a" :\t{ "b" : [ 1 , { } ] } } ',
        b"{}",
    ],
    ids=["NaN", "half", "name", "bytes", "name bytes", "twice", "big", "16", "32", "mark", "spaces", "empty"],
)
def test_engines_read_what_the_router_reads(raw: bytes) -> None:
    """Any JSON that Python accepts, as engines' servers do, has the same meaning after the
    router.
    """
    body = json.loads(raw)
    seen = json.loads(write(as_written(raw) | {"set": True}))
    assert repr(seen) == repr({**body, "set": True})  # NaN is not equal to itself


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=6), st.booleans())
def test_any_object_comes_out_as_it_went_in(body: dict[str, object], ascii_only: bool) -> None:
    """Objects with any names and values, with and without escapes, stay unchanged."""
    raw = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert json.loads(write(as_written(raw))) == body
