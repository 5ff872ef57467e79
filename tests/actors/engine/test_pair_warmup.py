"""A decode replica contacts the prefill replicas that it can reach."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine import engine_actor, pair_warmup
from actors.engine.engine_actor import Decode, Prefill
from actors.engine.pair_warmup import PeerReplicas, ProbeParams, peer_deployment, probe_timeout_s
from actors.request import ProducerAddress
from configs.settings.base import RoleName
from configs.settings.kv import TransferSettings

PROBES: list[ProbeParams] = [{"remote_engine_id": name} for name in ("out of reach", "near")]


class Prefills:
    """Two replicas, each with a probe for engines that it does not know."""

    async def ask(self, method: str, known: Collection[str]) -> list[list[dict[str, Any]]]:
        assert method == "probes_for"
        return [[] if name in known else [{"remote_engine_id": name}] for name in ("out of reach", "near")]


class Unstarted(Decode):
    """Nothing to end: the replica has no engine."""

    _prefill: Any
    engine: Any

    def __init__(self, ranks: int = 1) -> None:
        self._prefill, self.engine, self._probe_s = Prefills(), Engine(), 1.0
        self._warm = [{} for _ in range(ranks)]
        self.engines = [f"d{rank}" for rank in range(ranks)]

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Engine:
    """Engine that fetches every probe except one."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, str]] = []
        self.fetching = self.most_at_once = 0

    async def probe(self, probe: Mapping[str, Any], timeout_s: float, rank: int) -> None:
        self.fetching += 1
        self.most_at_once = max(self.most_at_once, self.fetching)
        await asyncio.sleep(0)
        self.fetching -= 1
        if probe["remote_engine_id"] == "out of reach":
            raise TimeoutError
        self.fetched.append((rank, probe["remote_engine_id"]))


async def test_one_that_cannot_be_met_keeps_nobody_from_the_others() -> None:
    """An unreachable engine does not prevent the replica's start: the warm-up runs in its
    constructor.
    """
    decode = Unstarted()
    await decode.warm_up_new_pairs()
    await decode.warm_up_new_pairs()
    assert decode.engine.fetched == [(0, "near")]
    assert set(decode._warm[0]) == {"near"}  # noqa: SLF001


async def test_engines_that_have_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start of a prefill engine has a new id."""
    monkeypatch.setattr(engine_actor, "MOST_WARM", 2)
    decode = Unstarted()
    for number in range(4):
        await decode.fetch_probes({"d0": [{"remote_engine_id": f"p{number}"}]})
    assert set(decode._warm[0]) == {"p2", "p3"}  # noqa: SLF001


async def test_a_starting_prefill_replica_meets_the_other_ranks_of_one_that_it_cannot_meet() -> None:
    """The replica waits for the timeout of one probe, so it fetches all probes at once."""
    decode = Unstarted(ranks=2)
    await decode.fetch_probes({"d0": PROBES, "d1": PROBES, "of another replica": PROBES})
    assert sorted(decode.engine.fetched) == [(0, "near"), (1, "near")]
    assert decode.engine.most_at_once == 4


class Computing(Prefill):
    """A prefill replica without an engine, whose rank 0 computes no probe."""

    engine: Any

    def __init__(self) -> None:
        self.engine, self._probe_s = self, 1.0
        self.ranks = range(3)
        self._producers = [ProducerAddress(f"p{rank}", "127.0.0.1", 1, 1) for rank in self.ranks]

    async def probe(self, transfer: Mapping[str, Any], timeout_s: float, rank: int) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(3600 if rank == 0 else 0)
        return {"remote_engine_id": f"p{rank}"}

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.usefixtures("virtual_time")
async def test_a_rank_that_computes_no_probe_keeps_nobody_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    probes = await Computing().probes_for({"p2"})
    assert probes == [{"remote_engine_id": "p1"}]
    assert "rank 0 has computed no probe" in caplog.text


async def test_a_handshake_that_fails_is_waited_for() -> None:
    """The probe's timeout is longer than the handshake's, so that the handshake's error is
    reported.
    """
    for handshake_s in (0.5, 30.0, 300.0):
        whole_s = probe_timeout_s(TransferSettings(handshake_s=handshake_s))
        assert whole_s > handshake_s
        assert PeerReplicas("decode", whole_s).timeout_s > whole_s


@pytest.mark.parametrize(
    ("own", "role", "peers"),
    [
        ("Decode", "prefill", "Prefill"),
        ("Decode-llama", "prefill", "Prefill-llama"),
        ("Prefill-Decode", "decode", "Decode-Decode"),
        ("Prefill-llama", "prefill", "Prefill-llama"),
    ],
)
def test_peers_are_those_of_the_same_model(
    monkeypatch: pytest.MonkeyPatch, own: str, role: RoleName, peers: str
) -> None:
    """Engines of another model would refuse the probe at their first contact."""
    monkeypatch.setattr(pair_warmup.serve, "get_replica_context", lambda: SimpleNamespace(deployment=own))
    assert peer_deployment(role) == peers
