"""Request parameters, prompt digests and limits: input from a router or an operator."""

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
    ProduceParams,
    names_engine,
    parse_params,
    prompt_digest,
    whole_blocks,
)

DECODE_LEG = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-a",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 2,
    "transfer_id": "t-1",
    "remote_block_ids": None,
}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": False}, {"x": 1}])
def test_requests_without_a_transfer(params: dict[str, object] | None) -> None:
    """Without parameters there is no transfer."""
    assert parse_params(params) is None


def test_prefill_legs() -> None:
    """The transfer id is the router's or generated here; ``describe`` requests the address."""
    assert parse_params({"do_remote_decode": True}) == ProduceParams(None, False)
    assert parse_params({"do_remote_decode": True, "transfer_id": "t"}) == ProduceParams("t", False)
    assert parse_params({"do_remote_decode": True, "describe": True}) == ProduceParams(None, True)
    assert parse_params({"do_remote_decode": True, "first_token": True}) == ProduceParams(None, False, True)
    transfers: list[dict[str, object]] = [{"transfer_id": "t"}, {"first_token": True}]
    for transfer in transfers:
        with pytest.raises(WireError, match="a request with describe sends no KV: remove transfer_id and first_token"):
            parse_params({"do_remote_decode": True, "describe": True} | transfer)


def test_discards() -> None:
    """Discard names the transfer that no engine will fetch."""
    assert parse_params({"do_remote_decode": True, "discard": True, "transfer_id": "t"}) == DiscardParams("t")
    with pytest.raises(WireError, match="discard needs a transfer_id"):
        parse_params({"do_remote_decode": True, "discard": True})


def test_lost_engines() -> None:
    """Ended engines are named by a prefix of their ids, never all of them at once."""
    assert parse_params({"engines_lost": "node-a."}) == LostParams("node-a.", "")
    assert parse_params({"engines_lost": "node-a.", "supervisor": "s"}) == LostParams("node-a.", "s")
    with pytest.raises(WireError, match="supervisor must be a string"):
        parse_params({"engines_lost": "node-a.", "supervisor": 5})
    for wrong in ("", ".", "x" * 257, 5, True, ["node-a."]):
        with pytest.raises(WireError, match="engines_lost must be an engine id or its prefix"):
            parse_params({"engines_lost": wrong})


@pytest.mark.parametrize(
    ("engines", "named"),
    [
        ("node-a.", True),
        ("node-a", True),
        ("node-a.one", True),
        ("node-a.one.start", True),
        ("node", False),
        ("node-", False),
        ("node-a.o", False),
        ("node-a.one.start.more", False),
        ("NODE-A", False),
    ],
)
def test_which_engines_are_named(engines: str, named: bool) -> None:
    """A prefix ends at a dot: node-1 does not match node-10."""
    assert names_engine(engines, "node-a.one.start") is named


def test_decode_legs() -> None:
    """The prefill answer's parameters, unchanged; keys of public proxies that we do not need are
    ignored.
    """
    address = EngineAddress("engine-a", "10.0.0.7", 5600)
    assert parse_params(DECODE_LEG) == ConsumeParams("t-1", address)
    assert parse_params(DECODE_LEG | {"prompt_multiple": 16}) == ConsumeParams("t-1", address, prompt_multiple=16)


@given(st.integers(1, 10_000), st.integers(1, 512))
def test_whole_blocks(prompt_tokens: int, multiple: int) -> None:
    """The result is the largest multiple that leaves a token of the prompt."""
    tokens = whole_blocks(prompt_tokens, multiple)
    assert tokens % multiple == 0
    assert tokens < prompt_tokens <= tokens + multiple


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"do_remote_decode": True}, "set do_remote_decode or do_remote_prefill, not both"),
        ({"transfer_id": None}, "transfer_id is missing"),
        ({"transfer_id": ""}, "transfer_id must be a string"),
        ({"transfer_id": 5}, "transfer_id must be a string"),
        ({"transfer_id": "x" * 257}, "transfer_id must be a string of 1 to 256"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_engine_id": ""}, "remote_engine_id"),
        ({"remote_engine_id": "x" * 257}, "remote_engine_id"),
        ({"remote_host": 7}, "remote_host"),
        ({"remote_host": "x" * 257}, "remote_host"),
        ({"remote_port": None}, "remote_port"),
        ({"remote_port": "5600"}, "remote_port must be a port number, not '5600'"),
        ({"remote_port": True}, "remote_port"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"prompt_multiple": -1}, "prompt_multiple must be a number of tokens, 0 or more, not -1"),
        ({"prompt_multiple": True}, "prompt_multiple"),
        ({"prompt_multiple": 1.5}, "prompt_multiple"),
    ],
)
def test_wrong_keys_are_named(change: dict[str, object], says: str) -> None:
    """The error begins with kv_transfer_params and names the key."""
    with pytest.raises(WireError, match=f"kv_transfer_params: .*{says}"):
        parse_params(DECODE_LEG | change)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300) | st.lists(st.integers())


WORDS = [*DECODE_LEG, "describe", "first_token", "prompt_multiple", "discard", "engines_lost", "supervisor"]


@given(st.dictionaries(st.sampled_from(WORDS), VALUES), st.booleans())
def test_fuzz_params(changes: dict[str, object], complete: bool) -> None:
    """Any values under any keys are parsed, or raise WireError."""
    try:
        parsed = parse_params((DECODE_LEG if complete else {}) | changes)
    except WireError:
        return
    assert parsed is None or isinstance(parsed, ProduceParams | DiscardParams | LostParams | ConsumeParams)


def test_prompt_digests_tell_prompts_apart() -> None:
    """Order and values matter, and so do all other inputs of KV: an image, an adapter, a salt."""
    prompts = [[1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [2**40]]
    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)
    assert prompt_digest(prompts[0]) == prompt_digest(tuple(prompts[0]))
    others = [[], ["adapter"], ["image-1"], ["image-2"], ["image-1", "adapter"], ["image-1adapter"]]
    assert len({prompt_digest(prompts[0], other) for other in others}) == len(others)


def test_alive_fits_twice_into_progress() -> None:
    """alive_s is at most half of progress_s, so one lost Alive does not end a transfer."""
    TransferLimits(progress_s=10, alive_s=5)
    with pytest.raises(ConfigurationError, match=r"transfer.alive_s \(6 s\) .* half of transfer.progress_s \(10 s\)"):
        TransferLimits(progress_s=10, alive_s=6)
