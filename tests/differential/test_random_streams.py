"""The generator of random streams: equal seeds, all features, and where a stop string ends."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.campaigns.differential.answers import Answer
from tests.campaigns.differential.campaign import Outcome, by_feature
from tests.campaigns.differential.cases import CHAT, COMPLETIONS, encode
from tests.campaigns.differential.random_streams import stopped_at, stream_cases, with_fields

COUNT = 2000


def test_equal_seeds_give_equal_streams() -> None:
    assert list(stream_cases(20, 1)) == list(stream_cases(30, 1))[:20]
    contents = [{case.requests[0].content for case in stream_cases(20, seed)} for seed in (1, 2)]
    assert not contents[0] & contents[1]


def test_all_features_of_the_seam_are_common() -> None:
    cases = list(stream_cases(COUNT, 1))
    counts = Counter(name.partition(",")[0] for case in cases for name in case.features)
    lengths = [f"max_tokens {length}" for length in (1, 2, 3)]
    for name in (COMPLETIONS, CHAT, "greedy", "seeded", "grammar", "tools", "logprobs", "penalties", "stop strings"):
        assert counts[name] >= COUNT / 10, name
    for name in (*lengths, "longer", "min_tokens", "usage in all events", "no stream options", "token ids as prompt"):
        assert counts[name] >= COUNT / 25, name


def test_every_stream_is_repeatable_and_has_its_own_prompt() -> None:
    cases = list(stream_cases(COUNT, 1))
    bodies = [json.loads(case.requests[0].content) for case in cases]
    assert all(body["stream"] and (body["temperature"] == 0 or "seed" in body) for body in bodies)
    assert len({json.dumps(body.get("prompt") or body["messages"]) for body in bodies}) == COUNT
    assert len({case.name for case in cases}) == COUNT


def test_other_fields_stay() -> None:
    (case,) = stream_cases(1, 1)
    body = json.loads(case.requests[0].content)
    assert json.loads(with_fields(case, cache_salt="a").requests[0].content) == body | {"cache_salt": "a"}


@pytest.mark.parametrize(
    ("stop", "where"),
    [
        ("4", "stopped at the first token"),
        ("42", "stopped across the seam"),
        ("27", "stopped after the seam"),
        (None, ""),
    ],
)
def test_where_a_stop_string_ends_a_stream(stop: Any, where: str) -> None:
    ids = encode("427" if stop != "4" else "4")[1:]
    answer = Answer(200, "text/event-stream", {"choices": {"0": {"stop_reason": stop, "token_ids": ids}}})
    assert stopped_at(answer) == where


def test_the_report_counts_by_feature() -> None:
    one, other = stream_cases(2, 1)
    outcomes = [
        Outcome(one, (200,), "remote", "", (), "prefill", ("a", "b, c"), "equal"),
        Outcome(other, (200,), "remote", "", ("text",), "decode", ("a",), "joined"),
    ]
    rows = {row["feature"]: (row["streams"], row["equal_events"], row["differ"]) for row in by_feature(outcomes)}
    assert rows == {"all": (2, 1, 1), "a": (2, 1, 1), "b": (1, 1, 0), "b, c": (1, 1, 0)}
