"""Request parameters, prompt digests and limits: input from a router or an operator."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.errors import ConfigurationError, WireError
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import (
    ConsumeParams,
    DiscardParams,
    EngineAddress,
    LostParams,
    MoveParams,
    ProduceParams,
    TransferParams,
    names_engine,
    parse_params,
    prompt_digest,
    whole_blocks,
)

PREFILL_LEG: dict[str, Any] = {"do_remote_decode": True}
DECODE_LEG: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-a",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 2,
    "transfer_id": "t-1",
    "remote_block_ids": None,
}
ADDRESS = EngineAddress("engine-a", "10.0.0.7", 5600)


@pytest.mark.parametrize(
    ("params", "parsed"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_decode": False, "do_remote_prefill": False, "transfer_id": "t"}, None),
        (PREFILL_LEG, ProduceParams(None, False)),
        (PREFILL_LEG | {"transfer_id": "t" * 256}, ProduceParams("t" * 256, False)),
        (PREFILL_LEG | {"describe": True}, ProduceParams(None, True)),
        (PREFILL_LEG | {"first_token": True}, ProduceParams(None, False, True)),
        (PREFILL_LEG | {"discard": True, "transfer_id": "t"}, DiscardParams("t")),
        (PREFILL_LEG | {"move": "r", "transfer_id": "t", "supervisor": "s"}, MoveParams("r", "t", "s")),
        ({"engines_lost": "node-a."}, LostParams("node-a.", "")),
        ({"engines_lost": "e" * 256, "supervisor": "s"}, LostParams("e" * 256, "s")),
        (DECODE_LEG, ConsumeParams("t-1", ADDRESS)),
        (DECODE_LEG | {"prompt_multiple": 16}, ConsumeParams("t-1", ADDRESS, prompt_multiple=16)),
        (DECODE_LEG | {"remote_num_tokens": 5}, ConsumeParams("t-1", ADDRESS, computed=True)),
        (DECODE_LEG | {"moved": True}, ConsumeParams("t-1", ADDRESS, moved=True)),
        (DECODE_LEG | {"remote_port": 1}, ConsumeParams("t-1", EngineAddress("engine-a", "10.0.0.7", 1))),
        (DECODE_LEG | {"remote_port": 65535}, ConsumeParams("t-1", EngineAddress("engine-a", "10.0.0.7", 65535))),
    ],
)
def test_parameters(params: dict[str, Any] | None, parsed: TransferParams | None) -> None:
    assert parse_params(params) == parsed


@pytest.mark.parametrize(
    ("leg", "key", "values"),
    [
        (DECODE_LEG, "do_remote_decode", [True]),
        (DECODE_LEG, "transfer_id", [None, "", 5, "x" * 257]),
        (DECODE_LEG, "remote_engine_id", [None, "", "x" * 257]),
        (DECODE_LEG, "remote_host", [7, "", "x" * 257]),
        (DECODE_LEG, "remote_port", [None, "5600", True, 0, 65536]),
        (DECODE_LEG, "prompt_multiple", [-1, True, 1.5]),
        (PREFILL_LEG, "discard", [True]),
        (PREFILL_LEG | {"describe": True}, "transfer_id", ["t"]),
        (PREFILL_LEG | {"describe": True}, "first_token", [True]),
        ({}, "engines_lost", ["", ".", "x" * 257, 5, True, ["node-a."]]),
        ({"engines_lost": "node-a."}, "supervisor", [5, None]),
    ],
)
def test_wrong_values_are_named(leg: dict[str, Any], key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(WireError, match=f"kv_transfer_params: .*{key}"):
            parse_params(leg | {key: value})


def test_parameters_are_an_object() -> None:
    with pytest.raises(WireError, match="list"):
        parse_params(["transfer_id"])  # type: ignore[arg-type]


KEYS = [
    *DECODE_LEG,
    "describe",
    "first_token",
    "prompt_multiple",
    "discard",
    "move",
    "moved",
    "engines_lost",
    "supervisor",
]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300) | st.lists(st.integers())


@given(st.dictionaries(st.sampled_from(KEYS), VALUES), st.booleans())
def test_any_parameters_are_parsed_or_refused(changes: dict[str, object], complete: bool) -> None:
    try:
        parse_params((DECODE_LEG if complete else {}) | changes)
    except WireError:
        return


@pytest.mark.parametrize("engines", ["node-a.", "node-a", "node-a.one", "node-a.one.start"])
def test_a_prefix_ends_at_a_dot(engines: str) -> None:
    """node-1 does not name node-10."""
    assert names_engine(engines, "node-a.one.start")
    for other in (engines.rstrip(".")[:-1], f"{engines.rstrip('.')}x", engines.upper(), "node-a.one.start.more"):
        assert not names_engine(other, "node-a.one.start")


@given(st.integers(1, 10_000), st.integers(1, 512))
def test_whole_blocks(prompt_tokens: int, multiple: int) -> None:
    """The largest multiple that leaves a token of the prompt."""
    tokens = whole_blocks(prompt_tokens, multiple)
    assert tokens % multiple == 0
    assert tokens < prompt_tokens <= tokens + multiple


def test_prompt_digests_distinguish_prompts() -> None:
    """Order and values matter, and all other inputs of KV: an image, an adapter, a salt."""
    prompts = [[1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [2**40], None]
    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)
    assert prompt_digest((1, 2, 3)) == prompt_digest([1, 2, 3])
    others = [[], ["adapter"], ["image-1"], ["image-2"], ["image-1", "adapter"], ["image-1adapter"]]
    assert len({prompt_digest([1], other) for other in others}) == len(others)
    known = prompt_digest([1, 2, 300], ("a", "bc"))
    assert known == "56bca9138b3ef54bbdb3795d8d88a32b", "engines of two releases compare digests"


def test_one_alive_may_be_lost() -> None:
    TransferLimits(progress_s=10, alive_s=5)
    with pytest.raises(ConfigurationError, match=r"5\.1 s.*10 s"):
        TransferLimits(progress_s=10, alive_s=5.1)
