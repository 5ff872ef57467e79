"""Kill decode engines while clients have prefill's first token and not yet decode's second.

    python -m tests.campaigns.differential.seam_deaths [--kills 100] [--streams 16] [--tp 1:1]
        [--seed 1] [--folder FOLDER]

One prefill and two decode replicas, `router.first_token: prefill`. Each round opens random streams
(`random_streams.py`) at once and kills the core or the actor of a decode engine by SIGKILL when a
random number of them have their first token. In two of three rounds the engine is stopped (SIGSTOP)
at that moment, and killed QUIET_S after the last byte that any client received, so none of its
tokens is on its way. All streams are compared with one vLLM server's. An *open seam* is a stream of
the killed engine whose client has received exactly prefill's first token when the engine is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil

from tests.campaigns.differential.answers import Reply, read
from tests.campaigns.differential.campaign import LIMITS, TIMEOUT_S, ask
from tests.campaigns.differential.cases import Case
from tests.campaigns.differential.compare import differences
from tests.campaigns.differential.pair import FRONTEND, PairOfServers, make_pair
from tests.campaigns.differential.random_streams import stream_cases, with_fields
from tests.campaigns.service.decode_deaths import (
    GONE_TIMEOUT_S,
    DecodeEngine,
    Decodes,
    Victim,
    count_resumed,
)

SEPARATE = {name: value for name, value in FRONTEND.items() if name != "enable_prompt_tokens_details"}
"""Frontend arguments without the number of cached tokens: a resumed stream has that of its second
engine (docs/decisions/0011).
"""

QUIET_S = 1.0
STATUS_S = 1.2
"""Wait before each request for the status; longer than the router reuses a status."""

MOST_CASES = 1_000_000
REQUEST_ID = "x-request-id"


@dataclass
class Stream:
    """A stream as its client has received it, with the number of its tokens."""

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

    @property
    def reply(self) -> Reply:
        return Reply(self.status, self.content_type, self.body)


@dataclass(frozen=True)
class Round:
    """One kill and its streams.

    ``at``           number of first tokens that clients had when the engine was stopped or killed
    ``unfinished``   streams of the killed engine that had not ended
    ``open``         those whose client had exactly prefill's first token
    ``begun``        those whose client had nothing
    ``differences``  by stream, of all streams of the round
    ``resumed``      streams that the router has continued on the other engine
    ``restart_s``    seconds until two engines served again before this round
    """

    number: int
    victim: Victim
    stopped: bool
    at: int
    streams: int
    unfinished: int
    open: int
    begun: int
    resumed: float
    gone: bool
    restart_s: float
    features: dict[str, int] = field(default_factory=dict)
    differences: dict[str, list[str]] = field(default_factory=dict)


def tokens_of(body: bytes) -> int:
    """Return the number of tokens in the whole events of a stream with token ids."""
    whole, _, _ = body.rpartition(b"\n\n")
    frames = [frame.removeprefix(b"data: ") for frame in whole.split(b"\n\n") if frame.startswith(b"data: {")]
    return sum(
        len(choice.get("token_ids") or ()) for frame in frames for choice in json.loads(frame).get("choices", ())
    )


def seam_cases(seed: int) -> Iterator[Case]:
    """Yield streams with a request id, whose events have token ids."""
    for number, case in enumerate(stream_cases(MOST_CASES, seed)):
        if "max_tokens 1" not in case.features:
            (request,) = with_fields(case, return_token_ids=True).requests
            headers = {**request.headers, REQUEST_ID: f"seam-{number}"}
            yield replace(case, requests=(replace(request, headers=headers),))


async def references(single: httpx.AsyncClient, cases: Iterator[Case], count: int) -> list[tuple[Case, Reply]]:
    """Return the next `count` cases whose answer has more than one token, and these answers."""
    found: list[tuple[Case, Reply]] = []
    while len(found) < count:
        some = list(islice(cases, count - len(found)))
        replies = await asyncio.gather(*(ask(single, case.requests[0]) for case in some))
        for case, (reply, _) in zip(some, replies, strict=True):
            assert reply.status == 200, f"{case.name}: HTTP {reply.status} {reply.body.decode()}"
            if tokens_of(reply.body) > 1:
                found.append((case, reply))
    return found


async def follow(http: httpx.AsyncClient, stream: Stream, heard: Callable[[], None]) -> None:
    """Receive a stream; call `heard` after each part, and at the end."""
    request = stream.case.requests[0]
    try:
        async with http.stream("POST", request.path, content=request.content, headers=request.headers) as reply:
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


class Blow:
    """Stop and kill of one engine during the streams, and the tokens that each client had then."""

    def __init__(
        self, streams: Sequence[Stream], engines: Sequence[DecodeEngine], victim: Victim, at: int, stops: bool
    ) -> None:
        self.had: dict[str, int] = {}
        """Tokens that the client of each unfinished stream had at the kill, by request id."""
        self.processes: list[psutil.Process] = []
        """Processes of the killed engine: actor, core, workers."""
        self._streams = streams
        self._engines = engines
        self._victim = victim
        self._at = at
        self._stops = stops
        self._heard_at = time.monotonic()
        self._work = [_computing(engine) for engine in engines]
        self._busy_s = [_busy_s(work) for work in self._work]

    def heard(self) -> None:
        """Record that a client has received data; stop or kill an engine once enough clients have a
        token.
        """
        self._heard_at = time.monotonic()
        if not self.processes and sum(stream.tokens > 0 for stream in self._streams) >= self._at:
            self._choose()
            if self._stops:
                self._signal(signal.SIGSTOP)
            else:
                self._kill()

    async def until_killed(self) -> None:
        """Wait for the kill; kill a stopped engine QUIET_S after a client last received data.

        Kill an engine in any case once all streams have ended.
        """
        while not self.had:
            await asyncio.sleep(0.02)
            quiet = self._stops and self.processes and time.monotonic() - self._heard_at > QUIET_S
            if quiet or all(stream.ended for stream in self._streams):
                self._kill()

    def _choose(self) -> None:
        """Choose the engine that has computed most since the streams were sent."""
        grown = [_busy_s(work) - before for work, before in zip(self._work, self._busy_s, strict=True)]
        index = grown.index(max(grown))
        self.processes = [self._engines[index].actor, *self._work[index]]

    def _kill(self) -> None:
        if not self.processes:
            self._choose()
        self.had = {stream.request_id: stream.tokens for stream in self._streams if not stream.ended} or {"": 0}
        actor, core, *_ = self.processes
        (core if self._victim == "core" else actor).kill()
        if self._stops:
            self._signal(signal.SIGCONT)  # a stopped process does not notice that its parent has ended

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes[1:]:
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue


def _computing(engine: DecodeEngine) -> list[psutil.Process]:
    """Return the core of an engine, then its workers: the fork server is the parent of both."""
    return [engine.core, *(one for one in engine.actor.children(recursive=True) if _is_worker(one))]


def _busy_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "Worker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


async def play_round(
    number: int,
    known: Sequence[tuple[Case, Reply]],
    decodes: Decodes,
    http: httpx.Client,
    rng: Random,
    victim: Victim,
) -> Round:
    """Open all streams, kill an engine, and compare the streams with their references."""
    began = time.monotonic()
    engines = await asyncio.to_thread(decodes.both)
    restart_s = time.monotonic() - began
    streams = [Stream(case) for case, _ in known]
    before, resumed = await _engines(http), await asyncio.to_thread(count_resumed, http)
    stops = number % 3 > 0
    at = rng.randint(1, max(1, len(streams) // 2) if stops else len(streams))
    blow = Blow(streams, engines, victim, at, stops)
    async with httpx.AsyncClient(base_url=http.base_url, timeout=TIMEOUT_S, limits=LIMITS) as client:
        following = [asyncio.create_task(follow(client, stream, blow.heard)) for stream in streams]
        await blow.until_killed()
        await asyncio.gather(*following)
    _, left = await asyncio.to_thread(psutil.wait_procs, blow.processes, GONE_TIMEOUT_S)
    resumed = await asyncio.to_thread(count_resumed, http) - resumed
    served_by = {one["request_id"]: one["decode"] for one in (await _status(http))["recent"]}
    killed = await _missing(http, before)
    its = [stream for stream in streams if stream.request_id in blow.had and served_by.get(stream.request_id) == killed]
    opened = [stream for stream in its if blow.had[stream.request_id] == 1 and stream.sampled_by == "prefill"]
    features: dict[str, int] = {}
    for name in (name for stream in opened for name in stream.case.features):
        features[name] = features.get(name, 0) + 1
    found = {
        stream.case.name: lines
        for stream, (_, reply) in zip(streams, known, strict=True)
        if (lines := differences(read(reply), read(stream.reply)))
    }
    return Round(
        number=number,
        victim=victim,
        stopped=stops,
        at=at,
        streams=len(streams),
        unfinished=len(its),
        open=len(opened),
        begun=sum(not blow.had[stream.request_id] for stream in its),
        resumed=resumed,
        gone=not left,
        restart_s=round(restart_s, 1),
        features=features,
        differences=found,
    )


async def _engines(http: httpx.Client) -> set[str]:
    return {one["replica"] for one in (await _status(http))["engines"] if one["role"] == "decode"}


async def _missing(http: httpx.Client, before: set[str]) -> str:
    """Return the one replica that the status no longer lists; it may omit the other for a while."""
    give_up_at = time.monotonic() + GONE_TIMEOUT_S
    while len(missing := before - await _engines(http)) != 1:
        assert time.monotonic() < give_up_at, f"of {before}, {missing} do not answer"
    return missing.pop()


async def _status(http: httpx.Client) -> Mapping[str, Any]:
    await asyncio.sleep(STATUS_S)
    status: Mapping[str, Any] = (await asyncio.to_thread(http.get, "/tandem/status")).json()
    return status


async def play(pair: PairOfServers, options: argparse.Namespace) -> list[Round]:
    """Play one round per kill, and begin none after `options.minutes`."""
    victims: Iterator[Victim] = cycle(("core", "core", "core", "core", "actor"))
    cases, rng, rounds = seam_cases(options.seed), Random(f"seam deaths {options.seed}"), []
    give_up_at = time.monotonic() + options.minutes * 60
    async with httpx.AsyncClient(base_url=pair.single_url, timeout=TIMEOUT_S, limits=LIMITS) as single:
        with closing(httpx.Client(base_url=pair.service.url, timeout=TIMEOUT_S)) as http:
            decodes = Decodes(pair.service, http)
            for number in range(options.kills):
                if time.monotonic() > give_up_at:
                    break
                known = await references(single, cases, options.streams)
                one = await play_round(number, known, decodes, http, rng, next(victims))
                rounds.append(one)
                line = json.dumps(asdict(one))
                print(line, flush=True)
                with (pair.folder / "rounds.jsonl").open("a") as out:
                    out.write(line + "\n")
    return rounds


def report(rounds: Sequence[Round]) -> str:
    """Return the sums, then the open seams by feature."""
    lines = []
    for name, some in (
        ("stopped, then killed", [one for one in rounds if one.stopped]),
        ("killed while it ran", [one for one in rounds if not one.stopped]),
        ("all", rounds),
    ):
        streams, unfinished, opened, begun, differ = (
            (
                sum(numbers)
                for numbers in zip(
                    *((one.streams, one.unfinished, one.open, one.begun, len(one.differences)) for one in some),
                    strict=True,
                )
            )
            if some
            else (0,) * 5
        )
        lines.append(
            f"{name}: {len(some)} engines killed under {streams} streams; of the {unfinished} unfinished ones of these "
            f"engines, {opened} had exactly prefill's first token, {begun} nothing; {differ} streams differ"
        )
    names = sorted({name for one in rounds for name in one.features})
    sums = [f"{name}: {sum(one.features.get(name, 0) for one in rounds)}" for name in names]
    resumed = sum(one.open for one in rounds if one.resumed >= one.unfinished)
    lines.append(f"open seams of rounds in which the router resumed every unfinished stream: {resumed}")
    return "\n".join([*lines, f"open seams by feature: {', '.join(sums)}"])


def main() -> int:
    """Return 0 if all streams equal the single server's, every killed engine has ended, and a seam
    was open.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--streams", type=int, default=16, help="streams at once")
    parser.add_argument("--tp", default="1:1", help="tensor_parallel_size of prefill and decode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="start no further round after this time")
    parser.add_argument("--folder", type=Path, help="keep a JSON line for each round and the logs here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service must not outlive this process
    folder = options.folder or Path(tempfile.mkdtemp(prefix="tandem-seam-"))
    folder.mkdir(parents=True, exist_ok=True)
    pair = make_pair(folder)
    pair.first_token, pair.decode_replicas, pair.frontend = "prefill", 2, SEPARATE
    pair.prefill_tp, pair.decode_tp = map(int, options.tp.split(":"))
    pair.start()
    try:
        rounds = asyncio.run(play(pair, options))
    finally:
        pair.stop()
    print(report(rounds))
    exact = not any(one.differences for one in rounds) and all(one.gone for one in rounds)
    return 0 if exact and rounds and sum(one.open for one in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
