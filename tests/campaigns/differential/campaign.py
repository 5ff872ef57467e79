"""Send all requests to both sides and report the differences: `make differential`.

    python -m tests.campaigns.differential.campaign [--only TEXT] [--damage SHARE]
        [--first-token ROLE] [--tp 1:1] [--streams COUNT --seed SEED] [--out FILE]

With `--damage` the single server loads another checkpoint: the campaign must find differences, and
fails otherwise. `--streams` sends random streams (`random_streams.py`) in place of the table of
cases, and also compares them event for event.
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
from typing import Literal

import httpx

from tests.campaigns.differential.answers import Reply, read
from tests.campaigns.differential.cases import Case, Request
from tests.campaigns.differential.compare import differences, event_groups
from tests.campaigns.differential.features import feature_cases, prompt_cases, stream_option_cases
from tests.campaigns.differential.messages import message_cases
from tests.campaigns.differential.model import damage, thinking_model
from tests.campaigns.differential.others import cache_cases, named_cases, route_cases, token_cases
from tests.campaigns.differential.pair import PairOfServers, make_pair
from tests.campaigns.differential.random_streams import stopped_at, stream_cases
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

LIMITS = httpx.Limits(max_keepalive_connections=0)
"""No idle connections: on a busy machine, a side may use one before it notices that the other has
closed it.
"""

Events = Literal["equal", "joined", "other"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case: `statuses` of the single server, route of the service's last answer,
    differences.

    ``features``  those of the case, and where a stop string ended the stream
    ``events``    of random streams: `equal` one for one, `joined` if either side has joined some,
                  `other` if they do not correspond
    """

    case: Case
    statuses: tuple[int, ...]
    route: str
    reason: str
    differences: tuple[str, ...]
    first_token: str = ""
    features: tuple[str, ...] = ()
    events: Events | None = None


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
    route = reason = sampled_by = stopped = ""
    events: Events | None = None
    for index, request in enumerate(case.requests):
        (one, _), (other, headers) = await asyncio.gather(ask(single, request), ask(service, request))
        statuses.append(one.status)
        route, reason = headers.get("x-tandem-route", ""), headers.get("x-tandem-local-reason", "")
        sampled_by = headers.get("x-tandem-first-token", "")
        expected, said = read(one, case.exact_ids), read(other, case.exact_ids)
        lines = differences(expected, said)
        if case.features:
            stopped = stopped_at(expected)
            groups = event_groups(one, other)
            events = "equal" if set(groups) == {(1, 1)} else "joined" if all(map(all, groups)) else "other"
            if events == "other":
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
    features = (*case.features, stopped) if stopped else case.features
    return Outcome(case, tuple(statuses), route, reason, tuple(found), sampled_by, features, events)


async def play_all(
    pair_urls: tuple[str, str],
    cases: Sequence[tuple[str, Case]],
    at_once: int = AT_ONCE,
    until: float = float("inf"),
) -> list[tuple[str, Outcome]]:
    """Run all cases, a few at a time; start none after `until` of the monotonic clock."""
    single_url, service_url = pair_urls
    gate = asyncio.Semaphore(at_once)
    async with (
        httpx.AsyncClient(base_url=single_url, timeout=TIMEOUT_S, limits=LIMITS) as single,
        httpx.AsyncClient(base_url=service_url, timeout=TIMEOUT_S, limits=LIMITS) as service,
    ):

        async def one(group: str, case: Case) -> tuple[str, Outcome] | None:
            async with gate:
                return (group, await play(case, single, service)) if time.monotonic() < until else None

        together = await asyncio.gather(*(one(group, case) for group, case in cases if not case.alone))
        all_of_them = [*together, *[await one(group, case) for group, case in cases if case.alone]]
        return [played for played in all_of_them if played is not None]


def report(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    """Return counts by group and by feature, then every case with a difference."""
    lines = []
    for group in dict.fromkeys(group for group, _ in outcomes):
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
    lines += by_feature([outcome for _, outcome in outcomes if outcome.features])
    for group, outcome in outcomes:
        if outcome.differences:
            lines.append(
                f"--- {group}: {outcome.case.name} (HTTP {outcome.statuses[-1]}, {outcome.route} {outcome.reason})"
            )
            lines += [f"    {line}" for line in outcome.differences[:12]]
    return "\n".join(lines)


def by_feature(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of random streams with a row for each feature: `grammar, regex` counts in
    `grammar` too.
    """
    if not outcomes:
        return []
    lines = ["| feature | streams | first token of prefill | of decode | equal events | joined events | differ |"]
    lines.append("|---" * lines[0].count(" | ") + "|---|")
    rows = [{"all"} | {part for name in one.features for part in (name, name.partition(",")[0])} for one in outcomes]
    for name in ["all", *sorted(set().union(*rows) - {"all"})]:
        mine = [outcome for outcome, row in zip(outcomes, rows, strict=True) if name in row]
        sampled_by = Counter(outcome.first_token for outcome in mine)
        events = Counter(outcome.events for outcome in mine)
        differ = sum(bool(outcome.differences) for outcome in mine)
        numbers = (len(mine), sampled_by["prefill"], sampled_by["decode"], events["equal"], events["joined"], differ)
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    return lines


def as_json(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    rows = [
        {
            "group": group,
            "case": outcome.case.name,
            "status": outcome.statuses[-1],
            "route": outcome.route,
            "reason": outcome.reason,
            "first_token": outcome.first_token,
            "events": outcome.events,
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
    parser.add_argument("--tp", default="1:1", help="tensor_parallel_size of prefill and decode")
    parser.add_argument("--streams", type=int, default=0, help="send this number of random streams instead")
    parser.add_argument("--seed", type=int, default=1, help="of the random streams")
    parser.add_argument("--skip", type=int, default=0, help="leave out this number of the first random streams")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="cases at once")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no further case after this time")
    parser.add_argument("--out", type=Path, help="write every case as JSON")
    parser.add_argument("--urls", nargs=2, metavar=("SINGLE", "SERVICE"), help="servers that run already")
    options = parser.parse_args()
    if options.streams:
        streams = [("streams", case) for case in stream_cases(options.streams, options.seed)][options.skip :]
        cases = [(group, case) for group, case in streams if re.search(options.only, f"{group}: {case.name}")]
    else:
        cases = list(all_cases(options.only))
    began = time.monotonic()
    until = began + options.minutes * 60
    if options.urls:
        outcomes = asyncio.run(play_all(tuple(options.urls), cases, options.at_once, until))
    else:
        with tempfile.TemporaryDirectory() as folder:
            pair = make_pair(Path(folder))
            if options.damage:
                (Path(folder) / "other").mkdir()
                other = thinking_model(Path(folder) / "other")
                damage(other, options.damage)
                pair = PairOfServers(pair.folder, pair.model, other)
            pair.first_token = options.first_token
            pair.prefill_tp, pair.decode_tp = map(int, options.tp.split(":"))
            pair.start()
            try:
                print(f"both sides are up after {time.monotonic() - began:.0f} s; {len(cases)} cases", flush=True)
                outcomes = asyncio.run(play_all((pair.single_url, pair.service.url), cases, options.at_once, until))
                pair.check_single()
            finally:
                pair.stop()
    print(report(outcomes), flush=True)
    differ = sum(bool(outcome.differences) for _, outcome in outcomes)
    print(f"{len(outcomes)} of {len(cases)} cases, {differ} differ; {time.monotonic() - began:.0f} s")
    if options.out:
        options.out.write_text(as_json(outcomes))
    if options.damage:
        print("the checkpoints differ: " + ("found" if differ else "NOT FOUND"))
        return 0 if differ else 1
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
