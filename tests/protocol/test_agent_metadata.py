"""Agent metadata: it survives a round trip, hostile input is refused, differences are named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.codec import decode_agent_metadata, encode_agent_metadata
from connectors.errors import IncompatiblePeerError, WireError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, Region
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
from tests.planning.builders import HOST, Shape, make_rank, with_field

IDENTITY = ModelIdentity("m0de1", "bfloat16", "auto", "0.32.0")


def agent_metadata(rank: int = 0, tp_size: int = 1, shape: Shape | None = None, **changes: Any) -> AgentMetadata:
    layout = make_rank(shape or Shape(), rank, tp_size).layout
    process = ProcessIdentity("b007-id/1/2", 4711, 123456)
    return replace(AgentMetadata("engine-a", IDENTITY, layout, "nixl", b"\x00meta\xff", process), **changes)


DOCUMENT = json.loads(encode_agent_metadata(agent_metadata()))


def changed(path: str | tuple[str | int, ...], value: object) -> bytes:
    """Return valid agent metadata with one field replaced, or removed if ``value`` is Ellipsis."""
    keys = [int(key) if key.isdigit() else key for key in path.split(".")] if isinstance(path, str) else [*path]
    whole = json.loads(json.dumps(DOCUMENT))
    inner = whole["worker"]
    for key in keys[:-1]:
        inner = inner[key]
    if value is Ellipsis:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("style", ["packed", "token_major"])
def test_every_field_survives_a_round_trip(style: str, tp_size: int) -> None:
    for rank in range(tp_size):
        ours = agent_metadata(rank, tp_size, Shape(style=style))
        assert decode_agent_metadata(encode_agent_metadata(ours)) == ours
        assert ours.rank == rank


def test_an_engine_has_all_its_ranks() -> None:
    """Sorted by rank, of one start, each at its number and with equal sizes."""
    ranks = {rank: agent_metadata(rank, 3, Shape(kv_heads=3)) for rank in (2, 0, 1)}
    engine = engine_metadata(ranks)
    assert (engine.incarnation, [worker.rank for worker in engine.workers]) == ("engine-a", [0, 1, 2])
    others = [{}, {1: ranks[1], 2: ranks[2]}, {0: ranks[0], 1: ranks[1]}, {0: ranks[1], 1: ranks[0], 2: ranks[2]}]
    others.append(ranks | {2: replace(ranks[2], incarnation="engine-b")})
    fewer = make_rank(Shape(kv_heads=3, groups=Shape().groups[:1]), 2, 3).layout
    others.append(ranks | {2: replace(ranks[2], layout=fewer)})
    for workers in others:
        with pytest.raises(WireError):
            engine_metadata(workers)


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ({"transport": "memory"}, "transport"),
        *(({"identity": replace(IDENTITY, **{each.name: "other"})}, each.name) for each in fields(ModelIdentity)),
        ({"layout": make_rank(Shape(kv_heads=8), 0, 1).layout}, "number of KV heads of layer 'layers.0.0'"),
        (
            {"layout": with_field(make_rank(Shape(), 0, 1).layout, 0, block_tokens=32)},
            "tokens per row of layer 'layers.0.0'",
        ),
        ({"layout": make_rank(Shape(style="packed"), 0, 1).layout}, "packing of layer 'layers.0.0'"),
    ],
)
def test_differences_are_named(theirs: dict[str, Any], field: str) -> None:
    """The decode engine is the consumer; the refusal names the property that differs."""
    with pytest.raises(IncompatiblePeerError) as refusal:
        check_peers(agent_metadata(**theirs), agent_metadata(identity=replace(IDENTITY, draft="")))
    assert refusal.value.field == field
    ours = {"model": "m0de1", "dtype": "bfloat16", "transport": "nixl"}.get(field)
    assert ours is None or f"decode engine has '{ours}'" in str(refusal.value)


def test_engines_that_fit() -> None:
    """Another start, TP size, pool or address space is no difference, also for the identity."""
    check_peers(agent_metadata(1, 2, Shape(num_blocks=40), incarnation="engine-b"), agent_metadata(3, 4))

    def identity(*workers: AgentMetadata) -> str:
        return engine_identity(EngineMetadata("e", workers))

    one = agent_metadata()
    assert identity(agent_metadata(0, 2, Shape(num_blocks=40)), agent_metadata(1, 2)) == identity(one)
    others = [agent_metadata(identity=replace(IDENTITY, **{each.name: "other"})) for each in fields(ModelIdentity)]
    others.append(agent_metadata(transport="memory"))
    others += [agent_metadata(shape=shape) for shape in (Shape(kv_heads=8), Shape(style="packed"))]
    others.append(agent_metadata(layout=with_field(one.layout, 0, block_tokens=32)))
    found = {identity(one), *map(identity, others), *(identity(one, other) for other in others)}
    assert len(found) == 1 + 2 * len(others)
    assert engine_identity(EngineMetadata("e", (one,)), b"secret") not in found


def test_another_version_is_named() -> None:
    with pytest.raises(WireError, match=f"{PROTOCOL_VERSION + 1}.* {PROTOCOL_VERSION}"):
        decode_agent_metadata(json.dumps(DOCUMENT | {"version": PROTOCOL_VERSION + 1}).encode())


LAYER = "layout.groups.0.layers.0."


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"null", b"[]", b'"metadata"', b"{}", b"{", b"\xff\xff", b"[" * 100_000, b" " * (16 * 2**20 + 1)),
        json.dumps({"version": PROTOCOL_VERSION, "worker": []}).encode(),
        *(
            changed(path, value)
            for path, values in {
                "incarnation": (3, ...),
                "identity": ([],),
                "identity.model": (7, ...),
                "transport": (None,),
                "transport_metadata": ("not base64!", 5, "ünïcode"),
                "process": ("4711",),
                "process.pid": ("4711", -1, True),
                "process.started_at": (2**63,),
                "process.host": (5,),
                "layout": ("x",),
                "layout.tp_rank": (1, -1),
                "layout.tp_size": (0, 4097, 2**40),
                "layout.caches_prefixes": (0, None),
                "layout.num_blocks": ("12", 10**6),
                "layout.regions": ([], {"a": 1}),
                "layout.regions.0.address": (-4096,),
                "layout.regions.0.memory_kind": ("DRAM",),
                "layout.regions.0.memory_kind.memory": (5,),
                "layout.groups.0.kind": ("mamba", ["full"]),
                "layout.groups.0.index": (2,),
                "layout.groups.0.block_tokens": (2**24 + 4, 0),
                "layout.groups.0.window_tokens": (None, 0),
                "layout.groups.2.window_tokens": (8,),
                "layout.groups.0.layers": (None, [3]),
                LAYER + "address": ("0x1000", 1),
                LAYER + "total_heads": (2**40, 4.0),
                LAYER + "heads": (True, 0),
                LAYER + "rows": (2**63, 2**20 + 1, ...),
                LAYER + "layer": (3,),
                LAYER + "packing": (3,),
            }.items()
            for value in values
        ),
    ],
    ids=lambda payload: payload[:20],
)
def test_hostile_metadata_is_refused(payload: bytes) -> None:
    """A missing, mistyped or impossible field, or one that would cost much time."""
    with pytest.raises(WireError):
        decode_agent_metadata(payload)


@pytest.mark.parametrize(("rows", "accepted"), [(2**20, True), (2**21, False)])
def test_a_plan_of_many_rows_is_refused(rows: int, accepted: bool) -> None:
    """A consistent layout may still cost a peer much memory."""
    pages = LayerPages("a", 1000, rows, 1, 1, rows, rows, 1, 1, "rows")
    group = Group(0, GroupKind.FULL, rows, None, (pages,))
    payload = encode_agent_metadata(
        agent_metadata(layout=EngineLayout(0, 1, 4, (Region(1000, 2**30, HOST),), (group,)))
    )
    if accepted:
        assert decode_agent_metadata(payload).layout.groups == (group,)
    else:
        with pytest.raises(WireError):
            decode_agent_metadata(payload)


def all_paths(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    keys: list[str | int] = list(node) if isinstance(node, dict) else []
    keys += list(range(len(node))) if isinstance(node, list) else []
    return [p for key in keys for p in ((*path, key), *all_paths(node[key], (*path, key)))]


ANY = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
)


@settings(max_examples=400)
@given(st.sampled_from(all_paths(DOCUMENT["worker"])), ANY | st.just(...))
def test_any_field_decodes_or_raises(path: tuple[str | int, ...], value: object) -> None:
    try:
        decoded = decode_agent_metadata(changed(path, value))
    except WireError:
        return
    assert decode_agent_metadata(encode_agent_metadata(decoded)) == decoded


@given(st.binary(max_size=100), st.integers(0, 3000))
def test_any_bytes_decode_or_raise(payload: bytes, cut: int) -> None:
    whole = encode_agent_metadata(agent_metadata())
    for candidate in (payload, whole[:cut], whole[:cut] + payload + whole[cut + len(payload) :]):
        try:
            decode_agent_metadata(candidate)
        except WireError:
            continue


FIRST_DECODES = """
import sys, threading
from connectors.codec import decode_agent_metadata
sys.setswitchinterval(1e-6)
payload = sys.stdin.buffer.read()
start = threading.Barrier(8)

def decode():
    start.wait()
    decode_agent_metadata(payload)

threads = [threading.Thread(target=decode) for _ in range(8)]
for one in threads:
    one.start()
for one in threads:
    one.join()
"""


def test_the_first_decodes_of_several_threads() -> None:
    """The handshake and the side channel decode in threads of one process.

    Each process crashed in two of three runs while msgspec built its description of the type then.
    """
    for _ in range(4):
        subprocess.run([sys.executable, "-c", FIRST_DECODES], input=encode_agent_metadata(agent_metadata()), check=True)
