"""Streams that another engine continues: killed or moved at random steps, TP 1 to 2 and 2 to 1.

Two engines in this process behind the router, each the heir of the other. Half of the streams are
greedy without logprobs and can move. A stream that stays is killed some tokens later. Each must be
equal to an undisturbed one of its first engine.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import cast

from actors.engine.vllm_engine import VllmEngine
from actors.request import Endpoint
from actors.router.client_request import ClientRequest
from actors.router.router import Router
from configs.settings.kv import TransferSettings
from tests.campaigns.differential.answers import Reply, read
from tests.campaigns.differential.cases import Case
from tests.campaigns.differential.compare import differences
from tests.campaigns.differential.deaths import tokens_of
from tests.campaigns.differential.random_streams import stream_cases, with_fields
from tests.campaigns.runner import Report
from tests.e2e.pair.conftest import BOUND_S, all_reset, until
from tests.e2e.two_engines import REQUEST_ID, SETTINGS, Fault, interrupted, start

AT_ONCE, LATER = 8, 3
KINDS = ("greedy", "seeded", "penalties", "min_tokens", "grammar", "tools", "stop strings", "logprobs")
GREEDY = dict.fromkeys(("seed", "logprobs", "top_logprobs")) | {"temperature": 0}


def _cases(seed: int) -> Iterator[Case]:
    for number, case in enumerate(stream_cases(10**6, seed)):
        found = case.features
        if "max_tokens 1" not in found and not any(each.startswith("reasoning") for each in found):
            if number % 2:
                case = with_fields(case, **GREEDY)
                found = ("greedy", *(each for each in found if each not in ("seeded", "logprobs")))
            yield replace(with_fields(case, return_token_ids=True), features=found)


def _way(router: Router, received: list[bool]) -> str | None:
    """Return how most tokens of the stream came to its second engine; None if it needed none."""
    value = router.metrics.registry.get_sample_value
    if not any(value("tandem_resumed_streams_total", {"outcome": each}) for each in ("moved", "resumed")):
        return None
    ways = ("moved", "prefilled", "replayed")
    tokens = {way: value("tandem_resumed_tokens_total", {"way": way}) or 0 for way in ways}
    if sum(tokens.values()) <= 1:
        return "after one token" if any(tokens.values()) else "from the start"
    way = max(ways, key=tokens.__getitem__)
    return way if way != "moved" or received == [True] else "moved without KV"


async def _play(report: Report, count: int, seed: int) -> None:
    options = {
        "engine": SETTINGS.engine | {"max_model_len": 2048, "enable_prefix_caching": True, "dtype": "float32"},
        # Blocks are free again because nothing holds them.
        "transfer": TransferSettings(lease_s=10 * BOUND_S),
    }
    one = await start(settings=SETTINGS.model_copy(update=options))
    more = {"decode": SETTINGS.decode.model_copy(update={"tensor_parallel_size": 2})}
    two = await start(settings=SETTINGS.model_copy(update=options | more))
    cases, ways, total, differ = enumerate(_cases(seed)), dict[str, Counter[str]](), Counter[str](), 0

    async def cut(number: int, case: Case, first: VllmEngine, heir: VllmEngine, direction: str) -> None:
        nonlocal differ
        draw, heirs, asked = Random(f"{seed} {number}"), Fault(), case.requests[0]
        headers = ((b"content-type", b"application/json"), (REQUEST_ID, b"s%06d" % number))
        stream = ClientRequest(cast(Endpoint, asked.path), headers, asked.content, json.loads(asked.content))
        whole, _ = await interrupted(first, stream, Fault(), heir, Fault())
        if (tokens := tokens_of(whole)) < 2:
            return
        fault = Fault(draw.randrange(1, tokens), moves=draw.choice((None, LATER, LATER)))
        sent, router = await interrupted(first, stream, fault, heir, heirs)
        lines = differences(*(read(Reply(200, "text/event-stream", body)) for body in (whole, sent)))
        differ += bool(lines)
        for line in lines[:4]:
            report.problem(f"{direction}, token {fault.dies_at} of {tokens}, {case.name}: {line}")
        if way := _way(router, heirs.received):
            total[way] += 1
            if total.total() % 50 == 0:
                report.row(seed=seed, differ=differ, **total)
            for kind in (direction, *(kind for kind in KINDS if any(each.startswith(kind) for each in case.features))):
                ways.setdefault(kind, Counter())[way] += 1

    async def client() -> None:
        while total.total() < count:
            number, case = next(cases)
            direction = names[number // 2 % 2]
            first, heir = directions[direction]
            await cut(number, case, first, heir, direction)

    directions = {"TP 1 to 2": (one, two), "TP 2 to 1": (two, one)}
    names = list(directions)
    try:
        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        for kind in (*names, *KINDS):
            report.row(seed=seed, kind=kind, **ways.get(kind, Counter()))
        report.row(seed=seed, differ=differ, **total)
        await until(lambda: all_reset(one._llm, two._llm))  # noqa: SLF001 - no public way to the block pools
    finally:
        await one.close()
        await two.close()


def continued(report: Report, *, count: int = 100, seed: int = 1) -> None:
    """This number of streams that went on elsewhere, of both directions together."""
    asyncio.run(_play(report, count, seed))
