"""Engines of several releases: which are paired, and which continue a stream."""

from __future__ import annotations

import json

import pytest

from actors.errors import CannotResumeError
from actors.request import TRANSFER_FIELD
from testing.sse import said
from tests.actors.behaviours import ALL, OK, ask, dies, engine, fleet, request, well
from tests.actors.fleet import SOURCE, at_rest

pytestmark = pytest.mark.usefixtures("virtual_time")


@pytest.mark.parametrize("equal", [True, False])
async def test_a_stream_is_resumed_only_on_engines_of_its_identity(equal: bool):
    """The weights at the model's path were replaced, and the other replicas have restarted."""
    router, p, d = fleet([well], [engine(3, [1])] * 3 + [engine(1, [1], dies_after=5)])
    d.in_order = True
    for replica in d.replicas[equal:3]:
        replica.identity = "other"
    if equal:
        assert said((await ask(router, request()))[1])["text"] == ALL
    else:
        with pytest.raises(CannotResumeError, match="another model"):
            await ask(router, request())
    await at_rest(p, d)
    assert [len(replica.calls) for replica in d.replicas] == [int(equal), 0, 0, 1]


@pytest.mark.parametrize(("prefill", "reason"), [("m", None), ("mo", None), ("oo", "other_identity")])
async def test_only_engines_of_one_identity_are_paired(prefill: str, reason: str | None):
    """Also for the first request, before the router knows the engines."""
    router, p, d = fleet([well] * len(prefill), [OK])
    for replica, identity in zip(p.replicas, prefill, strict=True):
        replica.identity = SOURCE.engine if identity == "m" else "other"
    for _ in range(4):
        assert (await ask(router, request(stream=False)))[0].local_reason == reason
    await at_rest(p, d)
    assert [bool(replica.calls) for replica in p.replicas] == [identity == "m" for identity in prefill]


@pytest.mark.parametrize(("full", "served"), [((), "01"), (("p0",), "1"), (("p1",), "0"), (("p0", "p1"), "01")])
async def test_a_release_whose_prefill_is_full_gets_no_prompt(full: tuple[str, ...], served: str):
    """While the other one has a free slot; decode would wait for its own, then compute."""
    router, p, d = fleet([well, well], [OK, OK])
    for replicas in (p.replicas, d.replicas):
        replicas[1].identity = "later"
    await ask(router, request(stream=False))
    p.full_replicas = frozenset(full)
    before = [len(replica.calls) for replica in d.replicas]
    for _ in range(4):
        assert (await ask(router, request(stream=False)))[0].local_reason is None
    await at_rest(p, d)
    found = [len(replica.calls) - old for replica, old in zip(d.replicas, before, strict=True)]
    assert "".join(str(index) for index, count in enumerate(found) if count) == served


async def test_a_decode_engine_of_an_earlier_release_serves_alone():
    """Its routers called prefill, so it would ignore the order."""
    router, p, d = fleet([well], [OK])
    d.replicas[0].version = 1
    answer, _ = await ask(router, request(stream=False))
    assert (answer.local_reason, p.calls) == ("older_engine", [])
    assert TRANSFER_FIELD not in json.loads(d.calls[0].body)
    await at_rest(p, d)


async def test_a_failed_prefill_engine_is_no_match(caplog: pytest.LogCaptureFixture):
    """The request does not wait for a slot that no engine can have."""
    router, p, d = fleet([dies, well], [OK, OK])
    p.replicas[1].identity = d.replicas[0].identity = "other"
    d.in_order = True  # the last replica is chosen, although the policy prefers the other one
    answer, _ = await ask(router, request(stream=False))
    assert answer.local_reason == "prefill_failed"
    assert "waiting for a free prefill replica" not in caplog.text
    await at_rest(p, d)
