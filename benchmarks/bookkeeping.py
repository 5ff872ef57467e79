"""Time of a router's bookkeeping in a large fleet: a pass over its waiting requests, a decision.

Without sockets, engines or Ray, in one thread.

pass      64 engines of one role, all slots taken, 128 requests wait. *Slot* is the return of one
          slot, which grants it to the first waiting request. *None* is an attempt without a free
          slot
decision  32 x 32 engines that hold the prompt, with running work and with costs measured for each
          engine and pair: the list of ongoing sequences of both roles, and the decision. *With
          stores*: each engine has a KV store of its own, which has the prompt. *Only stored*: the
          engines' caches do not hold it

Medians of each round, then the median and quartiles of the rounds. Exits with 1 if the median of a
pass, or of a decision for a prompt of 1 KB, exceeds `AIM_MS`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping

from actors.engine_pool.slots import EngineReplica, SlotPool
from actors.policy.planner import Planner
from actors.policy.prefixes import EngineStore
from actors.policy.prompts import Prompt, read_prompt
from actors.rpc.address import RpcAddress
from benchmarks.report import failed, spread, summary, write
from configs.settings.router import RoutingSettings

AIM_MS = 0.3
ENGINES, SLOTS, WAITING = 64, 64, 128
ROLE = 32
REPEATS = 200
STREAMS = 4
"""Number of running streams, and of queued prompts, of each engine."""


def fleet(role: str, engines: int) -> dict[str, EngineReplica]:
    names = [f"{role}{number:04d}" for number in range(engines)]
    return {name: EngineReplica(RpcAddress("10.0.0.1", 5700, "k" * 64), SLOTS, 256, {}, name) for name in names}


def timed_ms(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return (time.perf_counter() - began) * 1e3


async def passes() -> dict[str, float]:
    """Return the median milliseconds of a pass, with a free slot and without one."""
    engines = fleet("engine", ENGINES)
    pool = SlotPool(lambda: engines)
    slots = [await pool.take() for _ in range(ENGINES * SLOTS)]
    for name in engines:
        pool.record(next(one for one in slots if one.replica_id == name), "accepted", SLOTS)
    waiting = [asyncio.create_task(pool.take()) for _ in range(WAITING)]
    await asyncio.sleep(0)
    assert pool.waiting == WAITING, f"{pool.waiting} requests wait"
    without = statistics.median(timed_ms(pool.take_now) for _ in range(REPEATS))
    times = []
    for _ in range(REPEATS):
        times.append(timed_ms(lambda: pool.give_back(slots.pop())))
        assert pool.waiting == WAITING - 1
        waiting.append(asyncio.create_task(pool.take()))
        await asyncio.sleep(0)
        done = [one for one in waiting if one.done()]
        waiting = [one for one in waiting if not one.done()]
        slots[:0] = [one.result() for one in done]
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return {f"pass, {ENGINES} engines, {WAITING} waiting: slot": statistics.median(times), "the same: none": without}


def prompt_of(kilobytes: int) -> Prompt:
    text = "abcdefgh" * (kilobytes * 128)
    return read_prompt({"messages": [{"role": "user", "content": text}], "max_tokens": 100})


def busy_planner(
    prompt: Prompt, prefill: list[str], decode: list[str], stores: Mapping[str, EngineStore], cached: bool = True
) -> Planner:
    """Return a planner that has measured all pairs, whose engines are busy.

    ``cached``  whether the engines' caches hold `prompt`
    """
    settings = RoutingSettings() if cached else RoutingSettings(prefix_tokens_per_engine=0)
    planner, rng, now = Planner(settings), random.Random(1), 0.0
    small = prompt_of(1)
    planner.decide(small, dict.fromkeys(prefill, 0), dict.fromkeys(decode, 0), now, stores=stores)
    for first in prefill:
        for second in decode:
            request = planner.begin(small, second, first, now)
            planner.prefilled(request, now := now + rng.uniform(0.01, 0.1), 300)
            planner.opened(request, now := now + rng.uniform(0.001, 0.01))
            planner.ended(request, now := now + rng.uniform(0.1, 1.0), 100)
    for _ in range(STREAMS):
        for first, second in zip(prefill, decode, strict=True):
            request = planner.begin(prompt, second, first, now)
            planner.prefilled(request, now := now + 0.001)
            planner.opened(request, now := now + 0.001)
            planner.begin(prompt, second, first, now)
    return planner


def decision_ms(kilobytes: int, with_stores: bool = False, cached: bool = True) -> float:
    """Return the median milliseconds of a decision for a prompt of this size."""

    async def measure() -> float:
        engines = fleet("prefill", ROLE), fleet("decode", ROLE)
        pools = [SlotPool(lambda one=one: one) for one in engines]  # type: ignore[misc]
        for pool in pools:
            for _ in range(ROLE * STREAMS):
                await pool.take()
        prompt = prompt_of(kilobytes)
        names = [name for one in engines for name in one]
        stores = {name: EngineStore(name, 10**6, 256) for name in names} if with_stores else {}
        planner = busy_planner(prompt, list(engines[0]), list(engines[1]), stores, cached)
        loop = asyncio.get_running_loop()

        def decide() -> None:
            decision = planner.decide(prompt, pools[0].ongoing(), pools[1].ongoing(), loop.time(), stores=stores)
            assert len(decision.decode) == ROLE

        return statistics.median(timed_ms(decide) for _ in range(REPEATS))

    return asyncio.run(measure())


def main(*, rounds: int = 7) -> int:
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        measured = asyncio.run(passes())
        measured |= {f"decision, {ROLE} x {ROLE}, {size} KB": decision_ms(size) for size in (1, 16, 220)}
        measured["the same, 1 KB, with stores"] = decision_ms(1, with_stores=True)
        measured["the same, 1 KB, only stored"] = decision_ms(1, with_stores=True, cached=False)
        for name, value in measured.items():
            found.setdefault(name, []).append(value)
    result = {name: summary(values) for name, values in found.items()}
    for name, row in result.items():
        print(f"{name:44} {spread(row, 3)} ms")
    write("bookkeeping", {"aim_ms": AIM_MS, "rounds": rounds, "ms": result})
    aimed = {name: row for name, row in result.items() if not name.endswith(("16 KB", "220 KB"))}
    return failed({f"{name} takes more than {AIM_MS} ms": row["median"] > AIM_MS for name, row in aimed.items()})
