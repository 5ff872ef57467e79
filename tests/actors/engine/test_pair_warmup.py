"""A decode replica contacts the prefill replicas that it can reach."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine import pair_warmup
from actors.engine.decode import Decode
from actors.engine.pair_warmup import PeerReplicas, peer_deployment, probe_timeout_s
from configs.settings.base import RoleName
from configs.settings.kv import TransferSettings


class Prefills:
    """Two replicas, each with a probe for engines that it does not know."""

    async def ask(self, method: str, known: Collection[str]) -> list[list[dict[str, Any]]]:
        assert method == "probes_for"
        return [[] if name in known else [{"remote_engine_id": name}] for name in ("out of reach", "near")]


class Unstarted(Decode):
    """Created without an engine, so there is nothing to end."""

    _prefill: Any
    engine: Any

    def __init__(self, ranks: int = 1) -> None:
        self._prefill, self.engine, self._probe_s = Prefills(), Engine(), 1.0
        self._warm = [set() for _ in range(ranks)]

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Engine:
    """Fetches every probe except one."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, str]] = []

    async def consume_probe(self, probe: Mapping[str, Any], timeout_s: float, rank: int) -> None:
        if probe["remote_engine_id"] == "out of reach":
            raise TimeoutError
        self.fetched.append((rank, probe["remote_engine_id"]))


async def test_one_that_cannot_be_met_keeps_nobody_from_the_others() -> None:
    """Nor does it prevent the replica's start: this runs in its constructor."""
    decode = Unstarted()
    await decode.warm_up_new_pairs()
    await decode.warm_up_new_pairs()
    assert decode.engine.fetched == [(0, "near")]
    assert decode.warm == {"near"}


async def test_each_data_parallel_rank_warms_up() -> None:
    """A rank has its own connector, so the handshake of another rank does not help it."""
    decode = Unstarted(ranks=2)
    await decode.warm_up_new_pairs()
    assert sorted(decode.engine.fetched) == [(0, "near"), (1, "near")]
    assert decode.warm == {"near"}


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
