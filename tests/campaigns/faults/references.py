"""Requests whose ``kv_transfer_params`` belong to another request or differ from prefill's
answer.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

from testing.ports import free_port
from tests.campaigns.faults.trials import Question, Router, Trial, record

Params = dict[str, Any]


class NotApplicable(Exception):
    """The connector's parameters have no such field to alter."""


def altered(variant: str, params: Params, rng: random.Random, foreign_port: int) -> Params:
    """Return a copy of genuine parameters with one change. Raises NotApplicable."""
    changed = copy.deepcopy(params)
    match variant:
        case "altered engine id":
            _change(changed, "remote_engine_id", lambda value: value[:-1] + ("0" if value[-1] != "0" else "1"))
        case "altered host":
            _change(changed, "remote_host", lambda _: "127.0.0.77")
        case "closed port":
            _change(changed, "remote_port", lambda _: free_port())
        case "foreign port":
            _change(changed, "remote_port", lambda _: foreign_port)
        case "altered request id":
            keys: list[str] = [key for key in ("remote_request_id", "transfer_id") if key in changed]
            for key in keys:
                changed[key] = changed[key][:-1] + ("0" if changed[key][-1] != "0" else "1")
            if not keys:
                raise NotApplicable("no request id")
        case "altered token count":
            _change(changed, "remote_num_tokens", lambda value: max(1, value + rng.choice((-33, -1, 1, 64))))
        case "altered TP size":
            _change(changed, "tp_size", lambda value: rng.choice([size for size in (1, 2, 3, 8) if size != value]))
        case "block ids shifted":
            _blocks(changed, lambda group: [block + 3 for block in group])
        case "block ids reversed":
            _blocks(changed, lambda group: group[::-1])
        case "block ids out of range":
            _blocks(changed, lambda group: [block + 10**6 for block in group])
        case "a block missing":
            _blocks(changed, lambda group: group[:-1])
        case "keys missing":
            for key in rng.sample(sorted(changed.keys() - {"do_remote_prefill", "do_remote_decode"}), 2):
                del changed[key]
        case "keys of another type":
            # The router's next hop is JSON: any client could send these values.
            for key in rng.sample(sorted(changed.keys() - {"do_remote_prefill", "do_remote_decode"}), 2):
                changed[key] = rng.choice([None, -1, "", [], {"a": 1}, True, "x" * 5000])
        case _:
            raise ValueError(f"no such variant: {variant}")
    if json.dumps(changed) == json.dumps(params):
        raise NotApplicable("nothing to alter in a prompt this short")
    return changed


def _change(params: Params, key: str, change: Callable[[Any], Any]) -> None:
    if params.get(key) is None:
        raise NotApplicable(f"no {key}")
    params[key] = change(params[key])


def _blocks(params: Params, change: Callable[[list[int]], list[int]]) -> None:
    def apply(ids: Any) -> Any:
        return [apply(group) for group in ids] if ids and isinstance(ids[0], list | tuple) else change(list(ids))

    _change(params, "remote_block_ids", apply)


async def send(
    variant: str,
    router: Router,
    questions: list[Question],
    rng: random.Random,
    lease_s: float,
    restart_prefill: Callable[[], Awaitable[None]],
    foreign_port: int,
    start: Callable[[Trial, Awaitable[None]], asyncio.Task[None]],
) -> None:
    """Run one variant with two questions (of equal length) or more; ``start`` runs and keeps
    every trial.
    """
    ours, others, *more = questions

    def go(question: Question, between: Callable[[Trial], Awaitable[Params | None]] | None = None) -> Trial:
        trial = Trial(question)
        trials.append(start(trial, router.in_turn(trial, between)))
        return trial

    def direct(question: Question, reference: Trial) -> None:
        """Send a request to decode alone, with prefill's answer to another request."""
        trial = Trial(question, request_id=reference.request_id)
        trials.append(start(trial, _decode_only(router, trial, reference.params)))

    async def fetched(question: Question) -> Trial:
        """A request whose prefill has answered, with unfetched KV."""
        trial = Trial(question)

        async def keep(_: Trial) -> None:
            return None

        await start(trial, router.in_turn(trial, keep))
        trial.cancelled = True
        return trial

    trials: list[asyncio.Task[None]] = []
    match variant:
        case "twice at once":
            unused = await fetched(ours)
            direct(ours, unused)
            direct(ours, unused)
        case "twice in turn":
            first = go(ours)
            await asyncio.gather(*trials)
            direct(ours, first)
        case "with another prompt":
            direct(others, await fetched(ours))
        case "with another prompt, after its own":
            first = go(ours)
            await asyncio.gather(*trials)
            direct(others, first)
        case "exchanged between two requests":
            first, second = await fetched(ours), await fetched(others)
            direct(ours, second)
            direct(others, first)
        case "of an engine that has been restarted" | "of an engine that has been restarted, with another prompt":
            used, unused = go(ours), await fetched(ours)
            await asyncio.gather(*trials)
            await restart_prefill()
            for question in more:
                go(question)
            asked = others if "another" in variant else ours
            direct(asked, used)
            direct(asked, unused)
        case "after its lease" | "after its lease, with another prompt":
            unused = await fetched(ours)
            await asyncio.sleep(lease_s + 1.5)
            # The next request with the freed blocks overwrites them.
            for question in (*more, *more):
                go(question)
            await asyncio.gather(*trials)
            direct(others if "another" in variant else ours, unused)
        case _:

            async def between(trial: Trial) -> Params:
                assert trial.params is not None
                return altered(variant, trial.params, rng, foreign_port)

            trial = await fetched(ours)
            if trial.params is not None:
                altered(variant, trial.params, random.Random(0), foreign_port)
                direct(ours, trial)
            for question in (ours, others):
                go(question, between)
            for question in more:
                go(question)
    await asyncio.gather(*trials)


async def _decode_only(router: Router, trial: Trial, params: Params | None) -> None:
    async with record(trial):
        if params is None:
            trial.failure = "prefill has not answered"
        else:
            await router.decode(trial, params)
