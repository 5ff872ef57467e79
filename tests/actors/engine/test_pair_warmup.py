"""A decode replica contacts the prefill replicas that it can reach."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from actors.engine.decode import Decode
from actors.engine.pair_warmup import PeerReplicas, probe_timeout_s
from configs.settings import TransferSettings


class Prefills:
    """Two replicas, each with a probe for engines that it does not know."""

    async def ask(self, method: str, known: Collection[str]) -> list[dict[str, Any] | None]:
        assert method == "probe_for"
        return [None if name in known else {"remote_engine_id": name} for name in ("out of reach", "near")]


class Unstarted(Decode):
    """Created without an engine, so there is nothing to end."""

    _prefill: Any
    engine: Any

    def __init__(self) -> None:
        self._prefill, self.engine, self._warm, self._probe_s = Prefills(), Engine(), set(), 1.0

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Engine:
    """Fetches every probe except one."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    async def consume_probe(self, probe: Mapping[str, Any], timeout_s: float) -> None:
        if probe["remote_engine_id"] == "out of reach":
            raise TimeoutError
        self.fetched.append(probe["remote_engine_id"])


async def test_one_that_cannot_be_met_keeps_nobody_from_the_others() -> None:
    """Nor does it prevent the replica's start: this runs in its constructor."""
    decode = Unstarted()
    await decode.warm_up_new_pairs()
    await decode.warm_up_new_pairs()
    assert decode.engine.fetched == ["near"]
    assert decode.warm == {"near"}


async def test_a_handshake_that_fails_is_waited_for() -> None:
    """The probe's timeout is longer than the handshake's, so that the handshake's error is
    reported.
    """
    for handshake_s in (0.5, 30.0, 300.0):
        whole_s = probe_timeout_s(TransferSettings(handshake_s=handshake_s))
        assert whole_s > handshake_s
        assert PeerReplicas("decode", whole_s).timeout_s > whole_s
