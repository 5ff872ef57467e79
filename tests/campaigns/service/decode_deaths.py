"""Kill real decode engines in the middle of streams.

    python -m tests.campaigns.service.decode_deaths --first 1 --last 40

One prefill and two decode replicas. Each kill waits until both are running, opens a stream, and
ends the engine that serves it, by SIGKILL of its core or of its actor, when the client has the
given number of tokens.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from app.http.routes import OPEN_AGE_S
from testing.service_process import ServiceProcess, write_config
from testing.sse import said
from testing.streams import FRONTEND, KINDS, TOKENS

Victim = Literal["core", "actor"]

BOTH_TIMEOUT_S = 240.0
STREAM_TIMEOUT_S = 120.0
SILENCE_S = 30.0
GONE_TIMEOUT_S = 60.0

SETTLED_EVENTS = 50
"""Events after which other work of the engines, such as a handshake, is over."""

CLEAR_S, MAX_LOOKS, LOOK_EVERY_S = 0.03, 20, 0.01
"""Processor time that distinguishes the serving engine from the idle one; the kernel counts
ticks of 10 ms.
"""

LAST_EVENTS = 2
"""Usage and the end mark, after which there is nothing to resume."""


@dataclass(frozen=True)
class Death:
    """One kill and its outcome.

    `exact`: the client cannot distinguish the stream from the uninterrupted one; `gone`: neither
    the engine's actor nor its core is left.
    """

    kind: str
    at_event: int
    victim: Victim
    exact: bool
    resumed: bool
    gone: bool
    longest_gap_s: float


@dataclass(frozen=True)
class DecodeEngine:
    actor: psutil.Process
    core: psutil.Process

    @property
    def busy_s(self) -> float:
        times = self.core.cpu_times()
        return times.user + times.system


class Decodes:
    """The decode replicas of a running service."""

    def __init__(self, service: ServiceProcess, http: httpx.Client) -> None:
        self._service = service
        self._http = http

    def both(self) -> tuple[DecodeEngine, DecodeEngine]:
        """Return two engines that answer; wait for one that is being replaced."""
        give_up_at = time.monotonic() + BOTH_TIMEOUT_S
        while True:
            found = list(self._found())
            if len(found) == 2 and self._http.get("/health").json()["replicas"]["decode"] == 2:
                return found[0], found[1]
            assert time.monotonic() < give_up_at, f"{len(found)} decode engines after {BOTH_TIMEOUT_S:g} s"
            time.sleep(0.5)

    def _found(self) -> Iterator[DecodeEngine]:
        for process in self._service.processes():
            try:
                if ":Decode" in " ".join(process.cmdline()):
                    for child in process.children(recursive=True):
                        if "EngineCore" in " ".join(child.cmdline()):
                            yield DecodeEngine(process, child)
            except psutil.NoSuchProcess:
                continue


@contextmanager
def service_with_two_decodes(folder: Path) -> Iterator[tuple[ServiceProcess, httpx.Client]]:
    """One prefill and two decode replicas of the demo model; their log and trace are in
    `folder`.
    """
    config = write_config(
        "local.yaml",
        folder,
        frontend=FRONTEND,
        decode={"replicas": 2},
        transfer={"trace_path": str(folder / "trace.jsonl")},
        router={"silence_timeout_s": SILENCE_S},
    )
    service = ServiceProcess(config, folder)
    service.start()
    try:
        with httpx.Client(base_url=service.url, timeout=STREAM_TIMEOUT_S) as http:
            yield service, http
    finally:
        service.stop()


@dataclass(frozen=True)
class Whole:
    """An uninterrupted stream: its content, and its number of events."""

    said: dict[str, Any]
    events: int


def whole_stream(http: httpx.Client, kind: str, tokens: int = TOKENS) -> Whole:
    """Return the uninterrupted stream of a kind, the reference for interrupted ones."""
    endpoint, body = KINDS[kind]
    reply = http.post(endpoint, json=body | {"max_tokens": tokens}, headers={"x-request-id": "the-same"})
    assert reply.status_code == 200, reply.text
    return Whole(said(reply.content), reply.content.count(b"\n\n"))


def stream_with_a_death(
    http: httpx.Client,
    decodes: Decodes,
    kind: str,
    at_event: int,
    victim: Victim,
    whole: Whole,
    tokens: int = TOKENS,
) -> Death:
    """Stream `kind`, and kill the engine that serves it at the client's `at_event`-th event."""
    endpoint, body = KINDS[kind]
    engines = decodes.both()
    before = count_resumed(http)
    busy, settled = [engine.busy_s for engine in engines], False
    stream, longest, heard_at = b"", 0.0, time.monotonic()
    killed: DecodeEngine | None = None
    with http.stream(
        "POST", endpoint, json=body | {"max_tokens": tokens}, headers={"x-request-id": "the-same"}
    ) as reply:
        for some in reply.iter_raw():
            now = time.monotonic()
            longest, heard_at = max(longest, now - heard_at if stream else 0.0), now
            stream += some
            if not settled and stream.count(b"\n\n") >= max(at_event - SETTLED_EVENTS, SETTLED_EVENTS):
                # From here on only the engine that serves the stream computes.
                busy, settled = [engine.busy_s for engine in engines], True
            if killed is None and stream.count(b"\n\n") >= at_event:
                killed = _serving(engines, busy)
                getattr(killed, victim).kill()
    assert killed is not None, f"the stream ended before event {at_event}"
    _, left = psutil.wait_procs([killed.actor, killed.core], timeout=GONE_TIMEOUT_S)
    resumed = count_resumed(http) > before
    return Death(kind, at_event, victim, said(stream) == whole.said, resumed, not left, round(longest, 2))


def _serving(engines: Sequence[DecodeEngine], busy_s: Sequence[float]) -> DecodeEngine:
    """Return the engine that computes: its core's processor time has grown most since `busy_s` was
    read.

    A client that read many events at once reads both times within one tick of the kernel's clock,
    so this repeats.
    """
    for _ in range(MAX_LOOKS):
        grown = [engine.busy_s - before for engine, before in zip(engines, busy_s, strict=True)]
        if max(grown) - min(grown) >= CLEAR_S:
            break
        time.sleep(LOOK_EVERY_S)
    return engines[grown.index(max(grown))]


def count_resumed(http: httpx.Client) -> float:
    time.sleep(OPEN_AGE_S)  # the router returns a cached response for this time
    lines = http.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("tandem_resumed_streams_total{") and 'outcome="resumed"' in line
    )


def main() -> int:
    """Kill at each token of a range; return 1 if a stream was not exact, or was not interrupted
    as intended.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="keep a JSON line for each death, the log and the trace here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service must not outlive this process
    victims: Iterator[Victim] = cycle(("core", "core", "actor"))
    deaths = []
    folder = options.folder or Path(tempfile.mkdtemp(prefix="tandem-deaths-"))
    folder.mkdir(parents=True, exist_ok=True)
    with service_with_two_decodes(folder) as (service, http):
        decodes = Decodes(service, http)
        decodes.both()
        whole = {kind: whole_stream(http, kind) for kind in KINDS}
        kinds = cycle(KINDS)
        for at_event in range(options.first, options.last + 1):
            # Of the kinds with tokens after this one: arguments of tools arrive several per event.
            kind = next(kind for kind in kinds if whole[kind].events > at_event + LAST_EVENTS)
            death = stream_with_a_death(http, decodes, kind, at_event, next(victims), whole[kind])
            deaths.append(death)
            line = json.dumps(asdict(death))
            print(line, flush=True)
            with (folder / "deaths.jsonl").open("a") as out:
                out.write(line + "\n")
    exact, resumed, gone = (sum(getattr(one, name) for one in deaths) for name in ("exact", "resumed", "gone"))
    print(
        f"{len(deaths)} engines killed: {exact} streams exact, {resumed} of them resumed elsewhere, {gone} engines gone"
    )
    return 0 if exact == gone == len(deaths) else 1


if __name__ == "__main__":
    sys.exit(main())
