"""Kill decode engines under streams, which must go on as if nothing had happened.

One prefill and two decode replicas, and one vLLM server as the reference. Each round opens streams
at once, and kills the core or the actor of a decode engine by SIGKILL when all clients together
have received some tokens: with prefill's first tokens, often before decode's second.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
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
        yield Case(name, (request(path, body, JSON_TYPE),))


@dataclass
class Blow:
    """The kill of the engine that has computed most since the streams were sent.

    ``at``     number of tokens of all clients together, or of ``clients`` with tokens
    ``had``    tokens of each request that was open then
    """

    streams: Sequence[Stream]
    engines: Sequence[EngineProcess]
    victim: str
    at: int
    clients: bool
    had: dict[str, int] = field(default_factory=dict)
    processes: list[psutil.Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._busy_s = [engine.busy_s for engine in self.engines]

    def heard(self) -> None:
        """Strike if the moment has come; in any case once all streams have ended."""
        ended = all(stream.ended for stream in self.streams)
        counts = [bool(stream.tokens) if self.clients else stream.tokens for stream in self.streams]
        if self.processes or not (ended or sum(counts) >= self.at):
            return
        grown = [engine.busy_s - before for engine, before in zip(self.engines, self._busy_s, strict=True)]
        engine = self.engines[grown.index(max(grown))]
        self.processes = [engine.actor, *engine.computing]
        self.had = {stream.request_id: stream.tokens for stream in self.streams if not stream.ended}
        getattr(engine, self.victim).kill()


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


async def _round(report: Report, service: Any, http: httpx.AsyncClient, known: Any, **row: Any) -> int:
    """Open all streams, kill an engine, compare. Return the streams that it had not finished; with
    first tokens of prefill, only those at the seam: their clients had exactly this token.
    """
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
    blow = Blow(streams, engines, row["victim"], row["at"], clients=row["first_token"] == "prefill")
    await asyncio.gather(*(_follow(http, stream, blow.heard) for stream in streams))
    _, left = await asyncio.to_thread(psutil.wait_procs, blow.processes, GONE_S)
    more = await asyncio.to_thread(resumed) - resumed_before
    served_by = {one["request_id"]: one["decode"] for one in (await asyncio.to_thread(status, url))["recent"]}
    (gone,) = await asyncio.to_thread(
        until, lambda: len(lost := before - decodes()) == 1 and lost, "the dead one", GONE_S
    )
    its = [stream for stream in streams if stream.request_id in blow.had and served_by.get(stream.request_id) == gone]
    seams = [stream for stream in its if blow.had[stream.request_id] == 1 and stream.sampled_by == "prefill"]
    differ = 0
    for stream, (_, reply) in zip(streams, known, strict=True):
        lines = differences(read(reply), read(Reply(stream.status, stream.content_type, stream.body)))
        differ += bool(lines)
        for line in lines[:6]:
            report.problem(f"{row}, {stream.case.name}: {line}")
    report.equal(f"{row}: processes of the killed engine left", [str(one) for one in left], [])
    report.row(**row, streams=len(streams), unfinished=len(its), seams=len(seams), resumed=more, differ=differ)
    return len(seams if row["first_token"] == "prefill" else its)


async def _play(report: Report, pair: PairOfServers, cases: Iterator[Case], kills: int, count: int, last: int) -> None:
    victims, found = cycle(("core", "core", "core", "actor")), 0
    async with (
        httpx.AsyncClient(base_url=pair.single_url, timeout=TIMEOUT_S, limits=LIMITS) as single,
        httpx.AsyncClient(base_url=pair.service.url, timeout=TIMEOUT_S, limits=LIMITS) as http,
    ):
        for number in range(kills):
            known = await _references(single, cases, count)
            row = {"first_token": pair.first_token, "victim": next(victims), "at": 1 + number * last // kills}
            found += await _round(report, pair.service, http, known, **row)
    report.check(found, f"first token {pair.first_token}: no killed engine had such a stream")


def streams(report: Report, *, kills: int = 40, seed: int = 1, damage: float = 0.0) -> None:
    """Four streams of every kind a round, killed at the 1st to 120th token of them all; then 16
    random ones, whose first tokens are prefill's, at the first token of the 1st to 16th.
    """
    several = (case for case in stream_cases(10**6, seed) if "max_tokens 1" not in case.features)
    for first_token, cases, count, last in (("decode", kind_cases(), 4, 120), ("prefill", several, 16, 16)):
        numbered = (named(case, number) for number, case in enumerate(cases))
        folder = report.folder / first_token
        folder.mkdir()
        with pair_of_servers(folder, damage, first_token=first_token, decode_replicas=2, frontend=SEPARATE) as pair:
            asyncio.run(_play(report, pair, numbered, kills, count, last))
