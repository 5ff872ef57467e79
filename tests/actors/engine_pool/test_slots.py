"""Slots with engines: the choice, the queue, and no lost slot."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from actors.engine_pool import slots as module
from actors.engine_pool.slots import ANY, EngineReplica, Slot, SlotPool, SlotRequest
from actors.errors import OverloadedError
from actors.policy.admission import MOST_RETRY_S, SAFE_SHARE
from actors.rpc.address import RpcAddress

pytestmark = pytest.mark.usefixtures("virtual_time")

RPC = RpcAddress("127.0.0.1", 1, "key")
SECONDS, CAPACITY = 120.0, 2000 / 210
"""Of `test_overload`: two engines with 1000 tokens; a request holds 210 of them for a second."""


def engines(queue: int = 100, **slots: int) -> dict[str, EngineReplica]:
    return {name: EngineReplica(RPC, count, queue, {}, name) for name, count in slots.items()}


async def take(here: SlotPool, wanted: SlotRequest = ANY) -> str:
    """Return the engine of the slots."""
    return (await here.take(wanted)).replica_id


def take_now(here: SlotPool, wanted: SlotRequest = ANY) -> str | None:
    slot = here.take_now(wanted)
    return None if slot is None else slot.replica_id


def slot_on(name: str, sequences: int = 1, served: bool = True, tokens: int = 0) -> Slot:
    return Slot(name, EngineReplica(RPC, 1, 1, {}, name), sequences, served=served, tokens=tokens)


def give_back(here: SlotPool, name: str, sequences: int = 1, served: bool = True, tokens: int = 0) -> None:
    here.give_back(slot_on(name, sequences, served, tokens))


def record(here: SlotPool, name: str, outcome: str, ongoing: int = 0) -> None:
    here.record(slot_on(name), outcome, ongoing)


async def soon(*tasks: asyncio.Task[str]) -> list[str | None]:
    """Return the requests that have a slot by now."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return [task.result() if task.done() else None for task in tasks]


async def test_the_preferred_one_then_the_least_busy() -> None:
    here = SlotPool(lambda: engines(a=2, b=2, c=2))
    assert await take(here, SlotRequest(prefer=["b"])) == "b"
    assert await take(here, SlotRequest(prefer=["x", "b"])) == "b"
    assert await take(here, SlotRequest(prefer=["b", "a"], avoid={"a"})) == "c", "b is full"
    assert await take(here) == "a", "the only one without a call"
    assert here.ongoing() == {"a": 1, "b": 2, "c": 1}


async def test_an_engine_that_arrives_with_another_identity_is_not_taken() -> None:
    """A stream waits for an engine that may continue it."""
    here = dict[str, EngineReplica]()
    pool = SlotPool(lambda: here)
    assert take_now(pool, SlotRequest(identity="m")) is None
    waiting = asyncio.create_task(take(pool, SlotRequest(identity="m")))
    for name, identity in (("b", "other"), ("c", "m")):
        assert await soon(waiting) == [None]
        here[name] = EngineReplica(RPC, 1, 1, {"identity": identity}, name)
        await asyncio.sleep(1.5 * module.LOOK_AGAIN_S)
    assert await soon(waiting) == ["c"]


async def test_taking_without_a_wait() -> None:
    """Not if there is no slot, and not one that an earlier request may use."""
    here = SlotPool(lambda: engines(a=1))
    assert take_now(here) == "a"
    assert take_now(here) is None
    waiting = asyncio.create_task(take(here, SlotRequest(avoid={"a"})))
    await soon(waiting)
    give_back(here, "a")
    assert take_now(here) == "a", "the waiting request cannot use it"
    give_back(here, "a")
    waiting.cancel()
    await asyncio.wait({waiting})
    assert take_now(here, SlotRequest(avoid={"a"})) is None
    assert take_now(here, SlotRequest(sequences=3)) == "a"
    assert here.taken == 3


async def test_sequences_are_counted() -> None:
    """A call takes as many slots as it has sequences, and is granted while one is free."""
    here = SlotPool(lambda: engines(a=4, b=4))
    assert await take(here, SlotRequest(prefer=["a"], sequences=3)) == "a"
    assert [await take(here) for _ in range(3)] == ["b"] * 3
    assert here.ongoing() == {"a": 3, "b": 3}
    assert await take(here, SlotRequest(prefer=["a"], sequences=8)) == "a"
    assert await take(here) == "b"
    waiting = asyncio.create_task(take(here, SlotRequest(sequences=8)))
    small = asyncio.create_task(take(here))
    assert await soon(waiting, small) == [None, None]
    give_back(here, "b")
    assert await soon(waiting, small) == ["b", None], "a call with many sequences is not overtaken"
    give_back(here, "a", 8)
    assert await soon(small) == ["a"]
    assert here.ongoing() == {"a": 4, "b": 11}


async def test_who_waits_is_served_in_turn() -> None:
    here = SlotPool(lambda: engines(a=1, b=1))
    assert {await take(here), await take(here)} == {"a", "b"}
    first, second = (asyncio.create_task(take(here, SlotRequest(avoid=avoid))) for avoid in ({"a"}, set()))
    assert await soon(first, second) == [None, None]
    give_back(here, "a")
    assert await soon(first, second) == [None, "a"]
    give_back(here, "b")
    assert await soon(first, second) == ["b", "a"]
    assert here.waiting == 0


async def test_a_list_of_prompts_waits_like_one_request() -> None:
    """One prompt of the list counts towards the queue limit; other requests use the rest."""
    here = SlotPool(lambda: engines(queue=2, a=1))
    assert await take(here) == "a"
    prompts = [asyncio.create_task(take(here, SlotRequest(part=part))) for part in (False, True, True, True)]
    other = asyncio.create_task(take(here))
    assert await soon(*prompts, other) == [None] * 5
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        await take(here)
    for _ in range(5):
        give_back(here, "a")
    assert await asyncio.gather(*prompts, other) == ["a"] * 5
    assert here.waiting == 0


class CountedReplicas(dict[str, EngineReplica]):
    """Dictionary that counts the iterations over all replicas."""

    visits = 0

    def items(self) -> Any:
        self.visits += 1
        return super().items()

    def __iter__(self) -> Iterator[str]:
        self.visits += 1
        return super().__iter__()


async def test_a_returned_slot_costs_one_visit_of_the_replicas() -> None:
    """However many requests wait, the slot goes to the first one."""
    found = CountedReplicas(engines(queue=1000, **{f"e{number}": 1 for number in range(64)}))
    here = SlotPool(lambda: found)
    names = [await take(here) for _ in range(64)]
    waiting = [asyncio.create_task(take(here)) for _ in range(128)]
    await asyncio.sleep(0)
    found.visits = 0
    give_back(here, names[0])
    assert found.visits == 1
    assert await soon(*waiting) == [names[0]] + [None] * 127
    for task in waiting:
        task.cancel()


async def test_a_full_engine_is_asked_by_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The back-off grows until the engine accepts a call or one of this router's calls ends
    there; then it is probed at once.
    """
    now = 100.0
    monkeypatch.setattr(module, "_now", lambda: now)
    here = SlotPool(lambda: engines(a=5))
    assert [await take(here), await take(here)] == ["a", "a"]
    record(here, "a", "accepted", 2)
    assert not here._full  # noqa: SLF001
    record(here, "a", "full")  # another call has been refused
    for wait_s in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        waiting = [asyncio.create_task(take(here)) for _ in range(2)]
        now += wait_s * 0.99
        await asyncio.sleep(1.5 * module.LOOK_AGAIN_S)
        assert await soon(*waiting) == [None, None]
        now += wait_s * 0.02
        await asyncio.sleep(1.5 * module.LOOK_AGAIN_S)
        now += 60.0
        await asyncio.sleep(1.5 * module.LOOK_AGAIN_S)
        assert await soon(*waiting) == ["a", None], "one request probes, however long its answer takes"
        assert here._full  # noqa: SLF001
        record(here, "a", "full")
        give_back(here, "a", served=False)
        waiting[1].cancel()
    waiting = [asyncio.create_task(take(here)) for _ in range(2)]
    assert await soon(*waiting) == [None, None]
    give_back(here, "a")
    assert await soon(*waiting) == ["a", None], "one asks"
    record(here, "a", "accepted", 2)
    assert await soon(*waiting) == ["a", "a"], "the probe has found free slots"


async def test_who_asks_a_full_engine_and_leaves_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the probing request leaves, the next one probes in its turn."""
    now = 100.0
    monkeypatch.setattr(module, "_now", lambda: now)
    here = SlotPool(lambda: engines(a=5))
    record(here, "a", "full")
    now += 1.0
    assert await take(here) == "a"
    give_back(here, "a", served=False)
    waiting = asyncio.create_task(take(here))
    assert await soon(waiting) == [None]
    now += module.REFUSED_S
    await asyncio.sleep(1.5 * module.LOOK_AGAIN_S)
    assert await soon(waiting) == ["a"]


async def test_slots_of_other_routers_are_theirs() -> None:
    here = SlotPool(lambda: engines(a=5))
    await take(here)
    record(here, "a", "accepted", 4)
    waiting = [asyncio.create_task(take(here)) for _ in range(3)]
    assert await soon(*waiting) == ["a", "a", None], "the second request probes the engine"
    assert here._full  # noqa: SLF001
    record(here, "a", "accepted", 3)
    assert await soon(*waiting) == ["a", "a", "a"]


async def test_what_is_known_of_engines_that_are_gone_is_forgotten() -> None:
    """Replicas start and stop for months; no state of stopped ones remains."""
    found = engines(a=5)
    here = SlotPool(lambda: found)
    for turn in range(50):
        name = f"engine {turn}"
        found |= engines(**{name: 5})
        record(here, name, "accepted", 2)
        record(here, name, "full")
        record(here, name, "leaving")
        del found[name]
        give_back(here, await take(here))
    assert (here._others, here._full, here._leaving) == ({}, {}, set())  # noqa: SLF001


async def test_a_request_cancelled_just_after_its_grant_returns_the_slots() -> None:
    """The request's task has been granted slots, but has not run since."""
    here = SlotPool(lambda: engines(a=2))
    await take(here, SlotRequest(sequences=2))
    waiting = asyncio.create_task(take(here, SlotRequest(sequences=2)))
    assert await soon(waiting) == [None]
    give_back(here, "a", sequences=2)
    assert here.taken == 2, "granted"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (here.taken, here.ongoing()) == (0, {"a": 0})


def with_kv(queue: int = 1000, **tokens: int) -> dict[str, EngineReplica]:
    """Engines with 100 slots, and this many tokens of KV."""
    return {name: EngineReplica(RPC, 100, queue, {"kv_tokens": most}, name) for name, most in tokens.items()}


@pytest.mark.parametrize(
    ("wanted", "granted"),
    [
        ([60, 40, 1], [True, True, False]),
        ([60, 50, 10], [True, False, False]),  # later requests do not overtake one that needs more
        ([60, 0], [True, True]),
        ([500, 1], [True, False]),
    ],
)
async def test_kv_is_committed(wanted: list[int], granted: list[bool]) -> None:
    here = SlotPool(lambda: with_kv(a=100))
    asking = [asyncio.create_task(take(here, SlotRequest(tokens=tokens))) for tokens in wanted]
    assert [one is not None for one in await soon(*asking)] == granted
    give_back(here, "a", tokens=wanted[0])
    assert await asking[1] == "a"


async def test_one_that_needs_more_keeps_one_engine_free() -> None:
    """The others serve later requests meanwhile; requests of other routers count too."""
    here = SlotPool(lambda: with_kv(a=100, b=100))
    assert [await take(here, SlotRequest(tokens=tokens)) for tokens in (70, 80)] == ["b", "a"]
    large, small, later = (asyncio.create_task(take(here, SlotRequest(tokens=tokens))) for tokens in (90, 20, 5))
    assert await soon(large, small, later) == [None, "a", None]
    give_back(here, "b", tokens=70)
    assert await soon(large, later) == ["b", "b"]
    give_back(here, "a", tokens=80)
    record(here, "a", "accepted", 3)
    assert take_now(here, SlotRequest(tokens=60)) is None, "20, and 20 of each of the others"
    assert take_now(here, SlotRequest(tokens=10)) == "a"


async def test_a_call_that_moves_to_another_engine() -> None:
    """Decode has called another prefill engine, which has not accepted the call yet."""
    here = SlotPool(lambda: with_kv(a=100, b=100))
    slot = await here.take(SlotRequest(prefer=["a"], sequences=2, tokens=30))
    here.record(slot, "accepted", 2)
    assert slot.served
    here.move(slot, "b")
    assert (here.ongoing(), slot.replica_id, slot.served) == ({"a": 0, "b": 2}, "b", False)
    here.give_back(slot)
    assert (here.taken, here._committed.total()) == (0, 0)  # noqa: SLF001


def measure(here: SlotPool, tokens_per_s: int) -> None:
    for second in range(30):
        here._rate.observe(tokens_per_s if second else 0, True, now() - 30 + second)  # noqa: SLF001


async def test_only_a_request_that_must_wait_is_refused() -> None:
    """A request that waits for another engine delays nobody here, and neither does its work."""
    fleet = with_kv(a=1000, b=1000)
    here = SlotPool(lambda: fleet)
    measure(here, 100)
    assert await take(here, SlotRequest(prefer=["a"], tokens=900)) == "a"
    waiting = asyncio.create_task(take(here, SlotRequest({"b"}, tokens=1000)))
    assert await soon(waiting) == [None]
    assert await take(here, SlotRequest(tokens=100, wait_s=1.0)) == "b"
    with pytest.raises(OverloadedError, match=r"about (19|2\d) s"):
        await take(here, SlotRequest({"b"}, tokens=1000, wait_s=1.0))
    waiting.cancel()


async def test_the_wait_for_kv_is_that_for_what_lacks() -> None:
    here = SlotPool(lambda: with_kv(a=1000))
    measure(here, 100)
    await take(here, SlotRequest(tokens=100))
    waiting = asyncio.create_task(take(here, SlotRequest(tokens=950, wait_s=1.0)))
    assert await soon(waiting) == [None], "50 tokens lack: half a second"
    with pytest.raises(OverloadedError):
        await take(here, SlotRequest(tokens=200, wait_s=1.0))
    waiting.cancel()


async def test_refusals_end_after_engines_that_hung() -> None:
    """All requests that waited have timed out, so nothing more is measured."""
    here = SlotPool(lambda: engines(a=1))
    measure(here, 100)
    await take(here, SlotRequest(tokens=100))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(take(here, SlotRequest(tokens=100)), 600)
    give_back(here, "a", tokens=100)
    await asyncio.sleep(60)
    await take(here, SlotRequest(tokens=100))
    waiting = asyncio.create_task(take(here, SlotRequest(tokens=100, wait_s=10.0)))
    await asyncio.sleep(1)
    give_back(here, "a", tokens=100)
    assert await waiting == "a"


async def test_a_stream_that_continues_waits_for_no_kv_and_for_nobody() -> None:
    """Neither does a call that computes nothing."""
    here = SlotPool(lambda: {"a": EngineReplica(RPC, 4, 100, {"kv_tokens": 100}, "a")})
    await take(here, SlotRequest(tokens=60))
    large = asyncio.create_task(take(here, SlotRequest(tokens=90)))
    assert await soon(large) == [None]
    assert await take(here, SlotRequest(tokens=80, continues=True)) == "a"
    assert [await take(here), await take(here)] == ["a", "a"]
    later, continues = (asyncio.create_task(take(here, SlotRequest(continues=one))) for one in (False, True))
    assert await soon(later, continues) == [None, None]
    give_back(here, "a", tokens=60)
    assert await soon(large, later, continues) == [None, None, "a"]
    for task in (large, later):
        task.cancel()


async def test_a_prompt_that_no_cache_holds_reaches_vllm() -> None:
    """vLLM refuses it: it must not empty an engine first."""
    here = SlotPool(lambda: with_kv(a=1000))
    measure(here, 100)
    await take(here, SlotRequest(tokens=10))
    assert await take(here, SlotRequest(tokens=50_000, wait_s=1.0)) == "a"
    give_back(here, "a", tokens=50_000, served=False)
    assert await take(here, SlotRequest(tokens=10, wait_s=1.0)) == "a"


async def test_lower_priorities_wait_for_others() -> None:
    here, order = SlotPool(lambda: engines(a=1)), list[int]()
    await take(here)

    async def ask(number: int, priority: int) -> None:
        await take(here, SlotRequest(priority=priority))
        order.append(number)
        give_back(here, "a")

    asking = [asyncio.create_task(ask(*one)) for one in enumerate((0, 5, -1, 0, -1))]
    await asyncio.sleep(0)
    give_back(here, "a")
    await asyncio.gather(*asking)
    assert order == [2, 4, 0, 3, 1]


async def saturated(seed: int, load: float) -> tuple[SlotPool, list[Counter[str]]]:
    """Offer `load` times what two engines serve. The first of four keys sends 30 times as much as
    each other one.
    """
    dice, found, ongoing = random.Random(seed), [Counter[str]() for _ in range(4)], Counter[int]()
    fleet = with_kv(a=1000, b=1000)
    here = SlotPool(lambda: fleet)

    async def client(key: int) -> None:
        tokens, began = dice.randint(20, 400), now()
        ongoing[key] += 1
        crowds = ongoing[key] * len(+ongoing) > ongoing.total()
        try:
            name = await take(here, SlotRequest(tokens=tokens, wait_s=5.0 if crowds else 10.0))
            waited_s = now() - began
            found[key]["late" if waited_s * SAFE_SHARE > 10 else "served"] += 1
            assert all(count <= 1000 for count in here._committed.values())  # noqa: SLF001
            await asyncio.sleep(dice.expovariate(1.0))
            give_back(here, name, tokens=tokens)
        except OverloadedError as error:
            found[key][
                "refused" if now() - began < 1e-3 and 0 < error.retry_after_s <= MOST_RETRY_S + 1e-3 else "wrong"
            ] += 1
        finally:
            ongoing[key] -= 1

    async with asyncio.TaskGroup() as group:
        until = now() + SECONDS
        while now() < until:
            await asyncio.sleep(dice.expovariate(load * CAPACITY))
            group.create_task(client(dice.choices(range(4), (30, 1, 1, 1))[0]))
    return here, found


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("load", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
async def test_overload(seed: int, load: float) -> None:
    """Committed KV stays within the caches, admitted requests start in time, refusals come at once
    with Retry-After, and keys within their share are served.
    """
    here, found = await saturated(seed, load)
    assert (here.waiting, here.taken, here._committed.total()) == (0, 0, 0)  # noqa: SLF001
    total = sum(found, Counter[str]())
    assert (total["late"], total["wrong"]) == (0, 0), found
    assert total["served"] > 0.8 * min(load, 1.0) * CAPACITY * SECONDS, found
    assert all(one["refused"] <= 0.05 * one["served"] for one in found[1:]), found


async def test_no_slot_is_lost() -> None:
    """Random requests, some of which are cancelled while they wait or just after a grant."""
    rng = random.Random(1)
    here = SlotPool(lambda: engines(queue=1000, a=2, b=1))
    served = 0

    async def client() -> None:
        nonlocal served
        await asyncio.sleep(rng.random() * 0.05)
        async with asyncio.timeout(rng.choice([0.002, 0.02, 5])):
            name = await take(here, SlotRequest(rng.choice([set(), set(), {"a"}])))
            try:
                served += 1
                assert all(count <= most for count, most in zip(here.ongoing().values(), (2, 1), strict=True))
                await asyncio.sleep(rng.random() * 0.004)
            finally:
                give_back(here, name)

    ends = await asyncio.gather(*(client() for _ in range(400)), return_exceptions=True)
    assert {type(end) for end in ends} == {type(None), TimeoutError}
    assert served > 20
    assert (here.waiting, here.ongoing()) == (0, {"a": 0, "b": 0})
    await asyncio.sleep(module.LOOK_AGAIN_S)
    assert len(asyncio.all_tasks()) == 1
