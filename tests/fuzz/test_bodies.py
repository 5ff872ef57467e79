"""Hostile bodies through all of the router's parsing: an error with a status, or two legs."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from actors.engine.split_bodies import decode_body, prefill_body
from actors.large_json import as_written, write
from actors.request import Endpoint, ProducerAddress
from actors.router.client_request import why_local
from app.http.errors import BadRequestError
from app.http.parsing import check_prompts, parse_body
from tests.campaigns.fuzz.requests import CHAT, COMPLETIONS, Requests

PRODUCER = ProducerAddress("engine", "127.0.0.1", 1, 1)
ENDPOINTS: dict[str, Endpoint] = {COMPLETIONS: COMPLETIONS, CHAT: CHAT}


def test_bodies_never_break_the_router() -> None:
    """The router refuses many of 6,000 bodies, passes many on, and raises no other error."""
    requests, outcomes = Requests(5), {"refused": 0, "local": 0, "split": 0}
    for _ in range(6000):
        case = requests.case()
        endpoint = ENDPOINTS.get(case.path)
        if endpoint is None:
            continue
        try:
            body = parse_body(case.content)
            check_prompts(body, 128)
        except BadRequestError:
            outcomes["refused"] += 1
            continue
        if why_local(endpoint, body) is not None:
            outcomes["local"] += 1
            continue
        outcomes["split"] += 1
        written = as_written(case.content)
        for leg, same in (
            (prefill_body(endpoint, written, "t"), prefill_body(endpoint, body, "t")),
            (decode_body(written, "t", PRODUCER), decode_body(body, "t", PRODUCER)),
        ):
            assert leg["kv_transfer_params"]["transfer_id"] == "t"
            assert repr(parse_leg(leg)) == repr(same)
    assert min(outcomes.values()) > 200, outcomes


@pytest.mark.parametrize("opening", ["[", '{"a": '], ids=["lists", "objects"])
def test_no_depth_breaks_the_router(opening: str) -> None:
    """A body just within the parser's limit may be too deep for later code: it is refused with a
    status.
    """
    closing = "]" if opening == "[" else "}"
    for depth in range(40, 1100):
        text = opening * depth + "1" + closing * depth
        raw = f'{{"prompt": {text}, "x": {text}}}'.encode()
        try:
            body = parse_body(raw)
        except BadRequestError:
            continue
        why_local(COMPLETIONS, body)
        parse_leg(prefill_body(COMPLETIONS, as_written(raw), "t"))
        assert depth <= 64


def parse_leg(leg: Mapping[str, Any]) -> dict:
    """Parsed as in the engine."""
    return json.loads(write(leg))
