"""Agent metadata: it survives a round trip, and differences between two engines are named."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.codec import decode_agent_metadata, encode_agent_metadata
from connectors.errors import IncompatiblePeerError, WireError
from connectors.protocol.agent_metadata import (
    PROTOCOL_VERSION,
    AgentMetadata,
    EngineMetadata,
    ModelIdentity,
    ProcessIdentity,
    check_peers,
    engine_identity,
    engine_metadata,
)
from tests.planning.builders import Shape, make_rank, with_field

IDENTITY = ModelIdentity("m0de1", "bfloat16", "auto", "0.32.0")


def agent_metadata(rank: int = 0, tp_size: int = 1, shape: Shape | None = None, **changes: Any) -> AgentMetadata:
    layout = make_rank(shape or Shape(), rank, tp_size).layout
    process = ProcessIdentity("b007-id/1/2", 4711, 123456)
    return replace(AgentMetadata("engine-a", IDENTITY, layout, "nixl", b"\x00meta\xff", process), **changes)


def document(**changes: object) -> dict[str, Any]:
    return json.loads(encode_agent_metadata(agent_metadata())) | changes


def changed(path: list[str | int], value: object) -> bytes:
    """Return valid agent metadata with one field replaced, or removed if ``value`` is Ellipsis."""
    whole = document()
    inner = whole["worker"]
    for key in path[:-1]:
        inner = inner[key]
    if value is Ellipsis:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("style", ["packed", "token_major"])
def test_round_trip(style: str, tp_size: int) -> None:
    """Every field of every rank's agent metadata survives a round trip, strides and windows
    included.
    """
    for rank in range(tp_size):
        ours = agent_metadata(rank, tp_size, Shape(style=style))
        assert decode_agent_metadata(encode_agent_metadata(ours)) == ours
        assert ours.rank == rank


def test_an_engine_metadata_holds_all_ranks_in_order() -> None:
    """Agent metadata may arrive in any order; the engine's is sorted by rank."""
    rank_metadata = {rank: agent_metadata(rank, 3, Shape(kv_heads=3)) for rank in (2, 0, 1)}
    engine = engine_metadata(rank_metadata)
    assert (engine.incarnation, len(engine.workers)) == ("engine-a", 3)
    assert [worker.rank for worker in engine.workers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("rank_metadata", "says"),
    [
        ({}, "ranks must be 0, 1, 2, ... without gaps, not \\[\\]"),
        ({1: agent_metadata(1, 2)}, "ranks must be 0, 1, 2, ... without gaps, not \\[1\\]"),
        ({0: agent_metadata(0, 2), 1: agent_metadata(1, 2, incarnation="engine-b")}, "one incarnation"),
        ({0: agent_metadata(0, 2)}, "agent metadata of rank 0 of 1 describes rank 0 of 2"),
        ({0: agent_metadata(1, 2), 1: agent_metadata(0, 2)}, "agent metadata of rank 0 of 2 describes rank 1 of 2"),
        (
            {0: agent_metadata(0, 2), 1: agent_metadata(1, 2, Shape(groups=Shape().groups[:1]))},
            "agent metadata of rank 1 describes other layers than that of rank 0",
        ),
    ],
)
def test_metadata_of_no_engine_is_refused(rank_metadata: dict[int, AgentMetadata], says: str) -> None:
    """Engine metadata needs all ranks of one start, each at its index."""
    with pytest.raises(WireError, match=says):
        engine_metadata(rank_metadata)


@pytest.mark.parametrize(
    ("theirs", "field", "remedy"),
    [
        ({"transport": "memory"}, "transport", "same Tandem release"),
        ({"identity": replace(IDENTITY, model="other")}, "model", "same model"),
        ({"identity": replace(IDENTITY, dtype="float32")}, "dtype", "same dtype"),
        ({"identity": replace(IDENTITY, cache_dtype="fp8")}, "cache_dtype", "same kv_cache_dtype"),
        ({"identity": replace(IDENTITY, engine_version="0.31.0")}, "engine_version", "same vLLM release"),
        ({"identity": replace(IDENTITY, draft="other")}, "draft", "a method whose drafts have no KV"),
        (
            {"layout": make_rank(Shape(kv_heads=8), 0, 1).layout},
            "number of KV heads of layer 'layers.0.0'",
            "same model, dtype and KV layout",
        ),
        (
            {"layout": with_field(make_rank(Shape(), 0, 1).layout, 0, block_tokens=32)},
            "tokens per row of layer 'layers.0.0'",
            "same block_size",
        ),
        ({"layout": make_rank(Shape(style="packed"), 0, 1).layout}, "packing of layer 'layers.0.0'", "KV layout"),
    ],
)
def test_differences_are_named(theirs: dict[str, Any], field: str, remedy: str) -> None:
    """For each property that peers compare, the error has field, both values and remedy."""
    with pytest.raises(IncompatiblePeerError, match=remedy) as refusal:
        check_peers(agent_metadata(**theirs), agent_metadata())
    assert refusal.value.field == field
    assert f"{field} differs: the decode engine has" in str(refusal.value)


def test_the_identity_of_an_engine() -> None:
    """Equal for any TP and block size; each compared field of any worker changes it."""

    def identity(*workers: AgentMetadata) -> str:
        return engine_identity(EngineMetadata("e", workers))

    one = agent_metadata()
    assert identity(agent_metadata(0, 2, Shape(num_blocks=40)), agent_metadata(1, 2)) == identity(one)
    others = [agent_metadata(identity=replace(IDENTITY, **{each.name: "other"})) for each in fields(ModelIdentity)]
    others.append(agent_metadata(transport="memory"))
    found = {identity(one), *map(identity, others), *(identity(one, other) for other in others)}
    assert len(found) == 1 + 2 * len(others)


def test_our_side_and_theirs_are_not_mixed_up() -> None:
    """The message has the value of each role: the decode engine is the consumer."""
    with pytest.raises(IncompatiblePeerError, match="the decode engine has 'bfloat16', the prefill engine 'float32'"):
        check_peers(agent_metadata(identity=replace(IDENTITY, dtype="float32")), agent_metadata())


def test_engines_that_fit() -> None:
    """Another start, TP size, pool or address space is no difference."""
    check_peers(agent_metadata(1, 2, Shape(num_blocks=40), incarnation="engine-b"), agent_metadata(3, 4))


def test_another_version_says_both() -> None:
    """A peer of another version is refused by its version."""
    payload = json.dumps(document(version=PROTOCOL_VERSION + 1)).encode()
    with pytest.raises(WireError, match=f"version {PROTOCOL_VERSION + 1}, this engine {PROTOCOL_VERSION}"):
        decode_agent_metadata(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b'"metadata"',
        b"{}",
        b"{",
        b"\xff\xff",
        b"[" * 100_000,
        json.dumps({"version": PROTOCOL_VERSION}).encode(),
        json.dumps({"version": PROTOCOL_VERSION, "worker": []}).encode(),
        changed(["incarnation"], 3),
        changed(["incarnation"], ...),
        changed(["identity"], []),
        changed(["identity", "model"], 7),
        changed(["identity", "model"], ...),
        changed(["transport"], None),
        changed(["transport_metadata"], "not base64!"),
        changed(["transport_metadata"], 5),
        changed(["transport_metadata"], "ünïcode"),
        changed(["process"], "4711"),
        changed(["process", "pid"], "4711"),
        changed(["process", "pid"], -1),
        changed(["process", "started_at"], 2**63),
        changed(["process", "host"], 5),
        changed(["layout"], "x"),
        changed(["layout", "tp_rank"], 1),
        changed(["layout", "tp_rank"], -1),
        changed(["layout", "tp_size"], 0),
        changed(["layout", "tp_size"], 2**40),
        changed(["layout", "groups", 0, "layers", 0, "total_heads"], 2**40),
        changed(["layout", "groups", 0, "layers", 0, "total_heads"], 4.0),
        changed(["layout", "groups", 0, "layers", 0, "heads"], True),
        changed(["layout", "groups", 0, "layers", 0, "rows"], 2**63),
        changed(["layout", "groups", 0, "layers", 0, "kernel_blocks"], 2),
        changed(["layout", "num_blocks"], "12"),
        changed(["layout", "num_blocks"], 10**6),
        changed(["layout", "regions"], []),
        changed(["layout", "regions"], {"a": 1}),
        changed(["layout", "regions", 0, "address"], -4096),
        changed(["layout", "regions", 0, "memory_kind"], "DRAM"),
        changed(["layout", "regions", 0, "memory_kind", "memory"], 5),
        changed(["layout", "regions", 0, "memory_kind", "device"], "0"),
        changed(["layout", "groups", 0, "kind"], "mamba"),
        changed(["layout", "groups", 0, "kind"], ["full"]),
        changed(["layout", "groups", 0, "index"], 2),
        changed(["layout", "groups", 0, "window_tokens"], None),
        changed(["layout", "groups", 2, "window_tokens"], 8),
        changed(["layout", "groups", 0, "layers"], None),
        changed(["layout", "groups", 0, "layers", 0], 3),
        changed(["layout", "groups", 0, "layers", 0, "address"], "0x1000"),
        changed(["layout", "groups", 0, "layers", 0, "address"], 1),
        changed(["layout", "groups", 0, "layers", 0, "heads"], 0),
        changed(["layout", "groups", 0, "layers", 0, "rows"], ...),
        changed(["layout", "groups", 0, "layers", 0, "layer"], 3),
        changed(["layout", "groups", 0, "layers", 0, "packing"], 3),
    ],
)
def test_what_is_no_metadata_is_refused(payload: bytes) -> None:
    """A missing, unknown, mistyped or impossible field raises a WireError with a message."""
    with pytest.raises(WireError, match=r"metadata|string|number"):
        decode_agent_metadata(payload)


def all_paths(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the path of every field of agent metadata."""
    if isinstance(node, dict):
        keys: list[str | int] = list(node)
    else:
        keys = list(range(len(node))) if isinstance(node, list) else []
    return [p for key in keys for p in ((*path, key), *all_paths(node[key], (*path, key)))]


PATHS = all_paths(document()["worker"])
ANY = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
)


@settings(max_examples=400)
@given(st.sampled_from(PATHS), ANY | st.just(...))
def test_fuzz_fields(path: tuple[str | int, ...], value: object) -> None:
    """Agent metadata with a replaced field either encode again or raise a WireError."""
    try:
        decoded = decode_agent_metadata(changed(list(path), value))
    except WireError:
        return
    assert decode_agent_metadata(encode_agent_metadata(decoded)) == decoded


@settings(max_examples=200)
@given(st.binary(max_size=100), st.integers(0, 3000))
def test_fuzz_bytes(payload: bytes, cut: int) -> None:
    """Any bytes, and agent metadata with overwritten bytes, raise no other error than WireError."""
    whole = encode_agent_metadata(agent_metadata())
    for candidate in (payload, whole[:cut], whole[:cut] + payload + whole[cut + len(payload) :]):
        try:
            decode_agent_metadata(candidate)
        except WireError:
            continue
