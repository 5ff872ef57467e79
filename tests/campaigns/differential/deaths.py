"""Kill decode engines under streams, which must go on as if nothing had happened.

One prefill and two decode replicas, and one vLLM server as the reference. Each round opens streams
at once, and kills the core or the actor of a decode engine by SIGKILL at a given moment. In two of
three rounds of `seam_deaths` the engine is stopped (SIGSTOP) at that moment, and killed QUIET_S
after the last byte that any client received, so none of its tokens is on its way.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from random import Random
from typing import Any

import httpx
import psutil

from testing.streams import KINDS
from tests.campaigns.differential.answers import Reply, read
from tests.campaigns.differential.campaign import LIMITS, TIMEOUT_S, ask
from tests.campaigns.differential.cases import JSON_TYPE, Case, request
from tests.campaigns.differential.compare import differences
from tests.campaigns.differential.pair import FRONTEND, PairOfServers, pair_of_servers
from tests.campaigns.differential.random_streams import stream_cases, with_fields
from tests.campaigns.runner import Report
from tests.campaigns.service.world import EngineProcess, engine_processes, status, total, until

SEPARATE = {name: value for name, value in FRONTEND.items() if name != "enable_prompt_tokens_details"}
"""Frontend arguments without the number of cached tokens: a resumed stream has that of its second
engine (docs/decisions/0011).
"""

QUIET_S = 1.0
GONE_S = 60.0
REQUEST_ID = "x-request-id"


@dataclass
class Stream:
    """A stream as its client has received it."""

    case: Case
    body: bytes = b""
    status: int = 0
    content_type: str = ""
    sampled_by: str = ""
    tokens: int = 0
    ended: bool = False

    @property
    def request_id(self) -> str:
        return self.case.requests[0].headers[REQUEST_ID]


def tokens_of(body: bytes) -> int:
    """Return the number of tokens in the whole events of a stream with token ids."""
    whole, _, _ = body.rpartition(b"\n\n")
    frames = [frame.removeprefix(b"data: ") for frame in whole.split(b"\n\n") if frame.startswith(b"data: {")]
    return sum(
        len(choice.get("token_ids") or ()) for frame in frames for choice in json.loads(frame).get("choices", ())
    )


def named(case: Case, number: int) -> Case:
    """Return a case with a request id, whose events have token ids."""
    (one,) = with_fields(case, return_token_ids=True).requests
    return replace(case, requests=(replace(one, headers={**one.headers, REQUEST_ID: f"deaths-{number}"}),))


def kind_cases() -> Iterator[Case]:
    """Yield the kinds of streams that can resume, again and again."""
    for name in cycle(KINDS):
        path, body = KINDS[name]
        yield Case(name, (request(path, body, JSON_TYPE),), features=(name,))


@dataclass
class Blow:
    """Stop and kill of one engine during the streams, and the tokens that each client had then.

    ``due``  whether the moment has come
    """

    streams: Sequence[Stream]
    engines: Sequence[EngineProcess]
    victim: str
    stops: bool
    due: Callable[[], bool]
    had: dict[str, int] = field(default_factory=dict)
    killed: EngineProcess | None = None
    processes: list[psutil.Process] = field(default_factory=list)
    _heard_at: float = 0.0

    def __post_init__(self) -> None:
        self._busy_s = [engine.busy_s for engine in self.engines]

    def heard(self) -> None:
        """Record that a client has received data; strike if the moment has come."""
        self._heard_at = time.monotonic()
        if self.killed is None and self.due():
            self._choose()
            if self.stops:
                self._signal(signal.SIGSTOP)
            else:
                self._kill()

    async def until_killed(self) -> None:
        """Wait for the kill; strike in any case once all streams have ended."""
        while not self.had:
            await asyncio.sleep(0.02)
            quiet = self.stops and self.killed and time.monotonic() - self._heard_at > QUIET_S
            if quiet or all(stream.ended for stream in self.streams):
                self._kill()

    def _choose(self) -> None:
        """Choose the engine that has computed most since the streams were sent."""
        grown = [engine.busy_s - before for engine, before in zip(self.engines, self._busy_s, strict=True)]
        self.killed = self.engines[grown.index(max(grown))]
        self.processes = [self.killed.actor, *self.killed.computing]

    def _kill(self) -> None:
        if self.killed is None:
            self._choose()
        assert self.killed is not None
        self.had = {stream.request_id: stream.tokens for stream in self.streams if not stream.ended} or {"": 0}
        getattr(self.killed, self.victim).kill()
        if self.stops:
            self._signal(signal.SIGCONT)  # a stopped process does not notice that its parent has ended

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes[1:]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


async def _follow(http: httpx.AsyncClient, stream: Stream, heard: Callable[[], None]) -> None:
    """Receive a stream; call ``heard`` after each part, and at the end."""
    one = stream.case.requests[0]
    try:
        async with http.stream("POST", one.path, content=one.content, headers=one.headers) as reply:
            stream.status, stream.content_type = reply.status_code, reply.headers.get("content-type", "")
            stream.sampled_by = reply.headers.get("x-tandem-first-token", "")
            async for some in reply.aiter_raw():
                stream.body += some
                stream.tokens = tokens_of(stream.body)
                heard()
    except httpx.HTTPError as error:
        stream.content_type = f"no answer: {type(error).__name__}"
    finally:
        stream.ended = True
        heard()


async def _references(single: httpx.AsyncClient, cases: Iterator[Case], count: int) -> list[tuple[Case, Reply]]:
    """Return the next cases whose answer has more than one token, and these answers."""
    found: list[tuple[Case, Reply]] = []
    while len(found) < count:
        some = list(islice(cases, count - len(found)))
        replies = await asyncio.gather(*(ask(single, case.requests[0]) for case in some))
        for case, (reply, _) in zip(some, replies, strict=True):
            assert reply.status == 200, f"{case.name}: HTTP {reply.status} {reply.body.decode()}"
            found += [(case, reply)] * (tokens_of(reply.body) > 1)
    return found


@dataclass(frozen=True)
class Plan:
    """``rounds`` of ``streams`` at once from ``cases``.

    ``at``     number of tokens by round: of all clients together, or of clients that have any
    ``stops``  whether the engine is stopped before the kill, by round
    """

    cases: Iterator[Case]
    rounds: int
    streams: int
    at: Callable[[int], int]
    stops: Callable[[int], bool]
    clients: bool


async def _play(report: Report, pair: PairOfServers, plan: Plan) -> None:
    victims = cycle(("core", "core", "core", "actor"))
    opened = 0
    async with (
        httpx.AsyncClient(base_url=pair.single_url, timeout=TIMEOUT_S, limits=LIMITS) as single,
        httpx.AsyncClient(base_url=pair.service.url, timeout=TIMEOUT_S, limits=LIMITS) as http,
    ):
        for number in range(plan.rounds):
            known = await _references(single, plan.cases, plan.streams)
            opened += await _round(report, pair.service, http, plan, number, known, next(victims))
    report.check(opened, "no killed engine had a stream with exactly the tokens of the seam")


async def _round(
    report: Report,
    service: Any,
    http: httpx.AsyncClient,
    plan: Plan,
    number: int,
    known: Sequence[tuple[Case, Reply]],
    victim: str,
) -> int:
    """Open all streams, kill an engine, compare; return the number of streams at the seam."""
    url = service.url

    def both() -> list[EngineProcess]:
        found = engine_processes(service.processes(), "Decode")
        ready = httpx.get(f"{url}/health", timeout=30).json()["replicas"]["decode"] == 2
        return found if len(found) == 2 and ready else []

    def decodes() -> set[str]:
        return {one["replica"] for one in status(url)["engines"] if one["role"] == "decode"}

    def resumed() -> float:
        return total(url, "tandem_resumed_streams_total", outcome="resumed")

    engines = await asyncio.to_thread(until, both, "two decode engines serve")
    before, resumed_before = await asyncio.to_thread(decodes), await asyncio.to_thread(resumed)
    streams = [Stream(case) for case, _ in known]

    def due() -> bool:
        counts = [stream.tokens for stream in streams]
        return (sum(map(bool, counts)) if plan.clients else sum(counts)) >= plan.at(number)

    blow = Blow(streams, engines, victim, plan.stops(number), due)
    following = [asyncio.create_task(_follow(http, stream, blow.heard)) for stream in streams]
    await blow.until_killed()
    await asyncio.gather(*following)
    _, left = await asyncio.to_thread(psutil.wait_procs, blow.processes, GONE_S)
    more = await asyncio.to_thread(resumed) - resumed_before
    shown = await asyncio.to_thread(status, url)
    served_by = {one["request_id"]: one["decode"] for one in shown["recent"]}
    (gone,) = await asyncio.to_thread(
        until, lambda: len(lost := before - decodes()) == 1 and lost, "the dead one", GONE_S
    )
    its = [one for one in streams if one.request_id in blow.had and served_by.get(one.request_id) == gone]
    # An open seam: the client has exactly prefill's first token, and decode's second is missing.
    seams = [one for one in its if blow.had[one.request_id] == 1 and one.sampled_by == "prefill"]
    differ = 0
    for stream, (_, reply) in zip(streams, known, strict=True):
        lines = differences(read(reply), read(Reply(stream.status, stream.content_type, stream.body)))
        differ += bool(lines)
        for line in lines[:6]:
            report.problem(f"round {number}, {stream.case.name}: {line}")
    report.equal(f"round {number}: processes of the killed engine left", [str(one) for one in left], [])
    report.row(
        round=number, victim=victim, stopped=plan.stops(number), at=plan.at(number), streams=len(streams),
        unfinished=len(its), open_seams=len(seams), resumed=more, differ=differ,
        features=sorted({name for one in its for name in one.case.features}),
    )  # fmt: skip
    return len(seams) if plan.clients else len(its)


def seam_deaths(
    report: Report, *, kills: int = 100, count: int = 16, tp: str = "1:1", seed: int = 1, damage: float = 0.0
) -> None:
    """``count`` random streams a round, killed when some clients have prefill's first token."""
    rng = Random(f"seam deaths {seed}")
    moments = [rng.randint(1, count // 2 if number % 3 else count) for number in range(kills)]
    several = (case for case in stream_cases(10**6, seed) if "max_tokens 1" not in case.features)
    cases = (named(case, number) for number, case in enumerate(several))
    plan = Plan(cases, kills, count, moments.__getitem__, lambda number: number % 3 > 0, clients=True)
    with pair_of_servers(
        report.folder, damage, first_token="prefill", decode_replicas=2, frontend=SEPARATE, tp=tp
    ) as pair:
        asyncio.run(_play(report, pair, plan))


def streams(report: Report, *, kills: int = 40, count: int = 4, damage: float = 0.0) -> None:
    """``count`` streams of other kinds a round, killed at the 1st, 2nd, 3rd … token of them all."""
    cases = (named(case, number) for number, case in enumerate(kind_cases()))
    step = max(1, 120 // kills)
    plan = Plan(cases, kills, count, lambda number: 1 + number * step, lambda _: False, clients=False)
    with pair_of_servers(report.folder, damage, decode_replicas=2, frontend=SEPARATE) as pair:
        asyncio.run(_play(report, pair, plan))
