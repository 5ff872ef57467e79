"""Send all requests to the service and to one vLLM server; report the differences.

With ``damage`` the single server loads another checkpoint: the campaign must find differences.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.campaigns.differential.answers import Reply, read
from tests.campaigns.differential.cases import Case, Request
from tests.campaigns.differential.compare import differences, event_groups
from tests.campaigns.differential.features import feature_cases, prompt_cases, stream_option_cases
from tests.campaigns.differential.messages import message_cases
from tests.campaigns.differential.others import cache_cases, named_cases, route_cases, token_cases
from tests.campaigns.differential.pair import pair_of_servers
from tests.campaigns.differential.random_streams import stream_cases
from tests.campaigns.differential.wrong import broken_cases, wrong_cases
from tests.campaigns.runner import Report

GROUPS = {
    "features": feature_cases,
    "stream options": stream_option_cases,
    "prompts": prompt_cases,
    "caches": cache_cases,
    "tokens": token_cases,
    "names": named_cases,
    "routes": route_cases,
    "wrong": wrong_cases,
    "broken": broken_cases,
    "messages": message_cases,
}
TIMEOUT_S = 120.0

LIMITS = httpx.Limits(max_keepalive_connections=0)
"""No idle connections: on a busy machine, a side may use one before it notices that the other has
closed it.
"""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case: `statuses` of the single server, route of the service's last answer,
    differences; of random streams whether their events are equal one for one, and not joined.
    """

    case: Case
    statuses: tuple[int, ...]
    route: str
    reason: str
    differences: tuple[str, ...]
    first_token: str = ""
    equal_events: bool = False


def all_cases(only: str = "") -> Iterator[tuple[str, Case]]:
    """Return every case with the name of its group; `only` is a regular expression for its name."""
    for group, cases in GROUPS.items():
        for case in cases():
            if re.search(only, f"{group}: {case.name}"):
                yield group, case


async def ask(client: httpx.AsyncClient, request: Request) -> tuple[Reply, httpx.Headers]:
    try:
        reply = await client.request(request.method, request.path, content=request.content, headers=request.headers)
    except httpx.HTTPError as error:
        return Reply(0, f"no answer: {type(error).__name__}", b""), httpx.Headers()
    return Reply(reply.status_code, reply.headers.get("content-type", ""), reply.content), reply.headers


async def play(case: Case, single: httpx.AsyncClient, service: httpx.AsyncClient) -> Outcome:
    """Send `case` to both sides and compare."""
    found: list[str] = []
    statuses = []
    route = reason = sampled_by = ""
    equal = False
    for index, request in enumerate(case.requests):
        (one, _), (other, headers) = await asyncio.gather(ask(single, request), ask(service, request))
        statuses.append(one.status)
        route, reason = headers.get("x-tandem-route", ""), headers.get("x-tandem-local-reason", "")
        sampled_by = headers.get("x-tandem-first-token", "")
        expected, said = read(one, case.exact_ids), read(other, case.exact_ids)
        lines = differences(expected, said)
        if case.features:
            groups = event_groups(one, other)
            equal = set(groups) == {(1, 1)}
            if not all(map(all, groups)):
                found.append(f"events do not correspond, in groups {groups}")
        if not one.status and case.unanswered and 0 < other.status < 500:
            continue
        if not one.status:
            found.append(f"the single server gave {one.content_type}: there is nothing to compare with")
        if case.message_differs:
            lines = [line for line in lines if not line.startswith(".error.message:")]
        if case.only_status:
            lines = [line for line in lines if line.startswith("status:")]
        found += [f"[{index}] {line}" if len(case.requests) > 1 else line for line in lines]
    # If both engines refuse the request in their streams, either may be the first.
    routed = statuses[-1] < 400 and not other.refuses_in_stream
    if case.route is not None and routed and route != case.route:
        found.append(f"route: expected {case.route}, was {route!r} ({reason})")
    if route == "local" and not reason:
        found.append("served by decode alone, without a reason")
    return Outcome(case, tuple(statuses), route, reason, tuple(found), sampled_by, equal)


async def play_all(
    urls: tuple[str, str], cases: Sequence[tuple[str, Case]], at_once: int = 4
) -> list[tuple[str, Outcome]]:
    """Run all cases on the single server and the service, ``at_once`` at a time."""
    gate = asyncio.Semaphore(at_once)
    single, service = (httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=LIMITS) for url in urls)
    async with single, service:

        async def one(group: str, case: Case) -> tuple[str, Outcome]:
            async with gate:
                return group, await play(case, single, service)

        together = await asyncio.gather(*(one(group, case) for group, case in cases if not case.alone))
        return [*together, *[await one(group, case) for group, case in cases if case.alone]]


def _report(report: Report, outcomes: Sequence[tuple[str, Outcome]]) -> None:
    for group in dict.fromkeys(group for group, _ in outcomes):
        mine = [outcome for name, outcome in outcomes if name == group]
        answered = sum(outcome.statuses[-1] < 400 for outcome in mine)
        ways = Counter(outcome.route for outcome in mine if outcome.route)
        differ = sum(bool(outcome.differences) for outcome in mine)
        report.row(group=group, cases=len(mine), answered=answered, routes=ways, differ=differ)
    if streams := [outcome for _, outcome in outcomes if outcome.case.features]:
        first = Counter(outcome.first_token for outcome in streams)
        report.row(streams=len(streams), first_tokens=first, equal_events=sum(one.equal_events for one in streams))
    for group, one in outcomes:
        for line in one.differences[:12]:
            report.problem(f"{group}: {one.case.name} (HTTP {one.statuses[-1]}, {one.route} {one.reason}): {line}")


def _play(report: Report, cases: Sequence[tuple[str, Case]], at_once: int, damage: float, **pair: Any) -> None:
    with pair_of_servers(report.folder, damage, **pair) as servers:
        outcomes = asyncio.run(play_all((servers.single_url, servers.service.url), cases, at_once))
        servers.check_single()
    _report(report, outcomes)


def differential(
    report: Report, *, only: str = "", first_token: str = "decode", tp: str = "1:1", damage: float = 0.0
) -> None:
    """The table of cases; ``only``: a regular expression for ``group: name``."""
    _play(report, list(all_cases(only)), 4, damage, first_token=first_token, tp=tp)


def seam(
    report: Report, *, count: int = 2000, seed: int = 1, only: str = "", tp: str = "1:2", damage: float = 0.0
) -> None:
    """Random streams whose first token prefill samples; also compared event for event."""
    streams = [("streams", case) for case in stream_cases(count, seed) if re.search(only, case.name)]
    _play(report, streams, 12, damage, first_token="prefill", tp=tp)
