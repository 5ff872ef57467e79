"""Which engines an operator may drain."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.errors import LastEngineError, UnknownEngineError
from actors.router.drain import drain_engine


class Pool:
    """Engines by id, with whether each is drained; None: of a release without drains."""

    def __init__(self, role: str, **engines: bool | None) -> None:
        self.role, self.engines = role, engines

    async def tell_all(
        self, method: str, timeout_s: float, on: bool | None, *, only: str | None = None
    ) -> dict[str, Any]:
        replies: dict[str, Any] = {}
        for name, drained in self.engines.items():
            if only not in (None, name):
                continue
            await asyncio.sleep(0)
            if drained is None:
                replies[name] = KeyError(method)
                continue
            self.engines[name] = drained if on is None else on
            replies[name] = {"role": self.role, "replica": name, "drained": self.engines[name], "ongoing": 0}
        return replies

    def same_replica(self, name: str) -> frozenset[str]:
        return frozenset({name})

    def ongoing(self) -> dict[str, int]:
        return dict.fromkeys(self.engines, 0)


def service(**decode: bool | None) -> Any:
    pools = {"prefill": Pool("prefill", p=False), "decode": Pool("decode", **decode)}

    async def tell_engines(*arguments: Any) -> dict[tuple[str, str], Any]:
        return {(role, name): one for role in pools for name, one in (await pools[role].tell_all(*arguments)).items()}

    return SimpleNamespace(pools=pools, tell_engines=tell_engines)


@pytest.mark.parametrize(
    ("decode", "engine", "error"),
    [
        ({"a1": False, "a2": False}, "a1", None),
        ({"a1": False, "a2": False}, "a", UnknownEngineError),
        ({"a1": False}, "b", UnknownEngineError),
        ({"a1": False}, "p", None),
        ({"a1": False}, "a1", LastEngineError),
        ({"a1": False, "a2": True}, "a1", LastEngineError),
        ({"a1": True, "a2": True}, "a1", None),  # it is drained already
        ({"a1": False, "a2": None}, "a1", None),  # one of an earlier release accepts calls
    ],
)
async def test_the_last_decode_engine_stays(
    decode: dict[str, bool | None], engine: str, error: type[Exception] | None
) -> None:
    model = service(**decode)
    if error is None:
        assert (await drain_engine([model], engine, True, 1.0))["drained"]
        assert not (await drain_engine([model], engine, False, 1.0))["drained"]
    else:
        with pytest.raises(error):
            await drain_engine([model], engine, True, 1.0)
        assert model.pools["decode"].engines == decode


async def test_drains_at_the_same_time_leave_an_engine() -> None:
    model = service(a=False, b=False)
    asked = (drain_engine([model], name, True, 1.0) for name in "ab")
    await asyncio.gather(*asked, return_exceptions=True)
    assert not all(model.pools["decode"].engines.values())
