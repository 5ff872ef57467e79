"""Send all requests to both sides and report the differences: `make differential`.

    python -m tests.campaigns.differential.campaign [--only TEXT] [--damage SHARE]
        [--first-token ROLE] [--out FILE]

With `--damage` the single server loads another checkpoint: the campaign must find differences, and
fails otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.campaigns.differential.answers import Reply, read
from tests.campaigns.differential.cases import Case, Request
from tests.campaigns.differential.compare import differences
from tests.campaigns.differential.features import feature_cases, prompt_cases, stream_option_cases
from tests.campaigns.differential.messages import message_cases
from tests.campaigns.differential.model import damage, thinking_model
from tests.campaigns.differential.others import cache_cases, named_cases, route_cases, token_cases
from tests.campaigns.differential.pair import PairOfServers, make_pair
from tests.campaigns.differential.wrong import broken_cases, wrong_cases

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
AT_ONCE = 4
TIMEOUT_S = 120.0

LIMITS = httpx.Limits(keepalive_expiry=2.0)
"""uvicorn closes connections that are idle for 5 s; a request on a closing one gets no answer."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case: `statuses` of the single server, route of the service's last answer,
    differences.
    """

    case: Case
    statuses: tuple[int, ...]
    route: str
    reason: str
    differences: tuple[str, ...]
    first_token: str = ""


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
    for index, request in enumerate(case.requests):
        (one, _), (other, headers) = await asyncio.gather(ask(single, request), ask(service, request))
        statuses.append(one.status)
        route, reason = headers.get("x-tandem-route", ""), headers.get("x-tandem-local-reason", "")
        sampled_by = headers.get("x-tandem-first-token", "")
        expected, said = read(one, case.exact_ids), read(other, case.exact_ids)
        lines = differences(expected, said)
        if not one.status and case.unanswered and 0 < other.status < 500:
            continue
        if not one.status:
            found.append(f"the single server gave {one.content_type}: there is nothing to compare with")
        if case.message_differs:
            lines = [line for line in lines if not line.startswith(".error.message:")]
        if case.only_status:
            lines = [line for line in lines if line.startswith("status:")]
        found += [f"[{index}] {line}" if len(case.requests) > 1 else line for line in lines]
    if case.route is not None and statuses[-1] < 400 and route != case.route:
        found.append(f"route: expected {case.route}, was {route!r} ({reason})")
    if route == "local" and not reason:
        found.append("served by decode alone, without a reason")
    return Outcome(case, tuple(statuses), route, reason, tuple(found), sampled_by)


async def play_all(pair_urls: tuple[str, str], cases: Sequence[tuple[str, Case]]) -> list[tuple[str, Outcome]]:
    """Run all cases, a few at a time."""
    single_url, service_url = pair_urls
    gate = asyncio.Semaphore(AT_ONCE)
    async with (
        httpx.AsyncClient(base_url=single_url, timeout=TIMEOUT_S, limits=LIMITS) as single,
        httpx.AsyncClient(base_url=service_url, timeout=TIMEOUT_S, limits=LIMITS) as service,
    ):

        async def one(group: str, case: Case) -> tuple[str, Outcome]:
            async with gate:
                return group, await play(case, single, service)

        together = await asyncio.gather(*(one(group, case) for group, case in cases if not case.alone))
        return [*together, *[await one(group, case) for group, case in cases if case.alone]]


def report(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    """Return counts by group, then every case with a difference."""
    lines = []
    for group in GROUPS:
        mine = [outcome for name, outcome in outcomes if name == group]
        if mine:
            answered = sum(outcome.statuses[-1] < 400 for outcome in mine)
            ways = Counter(outcome.route for outcome in mine if outcome.route)
            ways += Counter(f"first tokens of {by}" for outcome in mine if (by := outcome.first_token))
            differ = sum(bool(outcome.differences) for outcome in mine)
            shown = ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))
            refused = len(mine) - answered
            lines.append(
                f"{group}: {len(mine)} cases ({answered} answered, {refused} refused; {shown}), {differ} differ"
            )
    for group, outcome in outcomes:
        if outcome.differences:
            lines.append(
                f"--- {group}: {outcome.case.name} (HTTP {outcome.statuses[-1]}, {outcome.route} {outcome.reason})"
            )
            lines += [f"    {line}" for line in outcome.differences[:12]]
    return "\n".join(lines)


def as_json(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    rows = [
        {
            "group": group,
            "case": outcome.case.name,
            "status": outcome.statuses[-1],
            "route": outcome.route,
            "reason": outcome.reason,
            "differences": outcome.differences,
        }
        for group, outcome in outcomes
    ]
    return json.dumps(rows, indent=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression: cases whose `group: name` contains it")
    parser.add_argument(
        "--damage", type=float, default=0.0, help="noise in one matrix of the single server's checkpoint"
    )
    parser.add_argument(
        "--first-token", choices=["prefill", "decode"], default="decode", help="router.first_token of the service"
    )
    parser.add_argument("--out", type=Path, help="write every case as JSON")
    parser.add_argument("--urls", nargs=2, metavar=("SINGLE", "SERVICE"), help="servers that run already")
    options = parser.parse_args()
    cases = list(all_cases(options.only))
    began = time.monotonic()
    if options.urls:
        outcomes = asyncio.run(play_all(tuple(options.urls), cases))
    else:
        with tempfile.TemporaryDirectory() as folder:
            pair = make_pair(Path(folder))
            if options.damage:
                (Path(folder) / "other").mkdir()
                other = thinking_model(Path(folder) / "other")
                damage(other, options.damage)
                pair = PairOfServers(pair.folder, pair.model, other)
            pair.first_token = options.first_token
            pair.start()
            try:
                print(f"both sides are up after {time.monotonic() - began:.0f} s; {len(cases)} cases", flush=True)
                outcomes = asyncio.run(play_all((pair.single_url, pair.service.url), cases))
            finally:
                pair.stop()
    print(report(outcomes), flush=True)
    differ = sum(bool(outcome.differences) for _, outcome in outcomes)
    print(f"{len(outcomes)} cases, {differ} differ; {time.monotonic() - began:.0f} s")
    if options.out:
        options.out.write_text(as_json(outcomes))
    if options.damage:
        print("the checkpoints differ: " + ("found" if differ else "NOT FOUND"))
        return 0 if differ else 1
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
