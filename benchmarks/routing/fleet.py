"""Simulate a fleet over time: arrivals, engine steps and transfers, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.routing.loads import Load, Request
from benchmarks.routing.machine import BLOCK_TOKENS, Cache, Engine, Hardware, Job


@dataclass(frozen=True)
class Route:
    """Destination of a request: indices of engines; `prefill` None for decode alone."""

    decode: int
    prefill: int | None


class Policy(Protocol):
    """Policy that chooses destinations, and receives the events that a router would observe."""

    def route(self, request: Request, fleet: Fleet) -> Route: ...

    def saw(self, what: str, request: Request, fleet: Fleet) -> None: ...


class Fleet:
    """State of the simulation. `fork` copies it, to simulate ahead."""

    def __init__(
        self,
        hardware: Hardware,
        prefill: int,
        decode: int,
        factors: dict[str, float],
        stored_tokens: int = 0,
        hosts: int = 1,
    ) -> None:
        self.hardware = hardware
        self.stored_tokens = stored_tokens
        """Room in the KV store of each host; 0: no stores."""
        self.now = 0.0
        self._stores = [Cache(stored_tokens // BLOCK_TOKENS) for _ in range(hosts)]
        self.prefill = [
            Engine(hardware, "prefill", factors.get(f"p{n}", 1.0), store=self._store(n)) for n in range(prefill)
        ]
        self.decode = [
            Engine(hardware, "decode", factors.get(f"d{n}", 1.0), store=self._store(n)) for n in range(decode)
        ]
        self.jobs: dict[int, Job] = {}
        """All requests that have not ended."""
        self._egress = [0.0] * prefill
        self._ingress = [0.0] * decode
        self._heap: list[tuple[float, int, str, int]] = []
        self._order = 0

    def fork(self) -> Fleet:
        copy = Fleet.__new__(Fleet)
        copy.hardware, copy.now, copy.stored_tokens = self.hardware, self.now, self.stored_tokens
        copy._stores = [store.fork() for store in self._stores]
        copy.jobs = {number: job.fork() for number, job in self.jobs.items()}
        copy.prefill = [engine.fork(copy.jobs, copy._store(n)) for n, engine in enumerate(self.prefill)]
        copy.decode = [engine.fork(copy.jobs, copy._store(n)) for n, engine in enumerate(self.decode)]
        copy._egress, copy._ingress = list(self._egress), list(self._ingress)
        copy._heap, copy._order = list(self._heap), self._order
        return copy

    def at(self, when: float, what: str, number: int) -> None:
        """Schedule an event of a request or an engine."""
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, what, number))

    def upcoming(self, what: str) -> list[tuple[float, int]]:
        """Return (time, number) of the scheduled events of kind `what`, in order."""
        return sorted((when, number) for when, _, kind, number in self._heap if kind == what)

    def send(self, request: Request, route: Route) -> Job:
        """Start a request."""
        job = Job(
            request.number, request.prompt_tokens, request.answer_tokens, request.blocks, request.effort, self.now
        )
        job.decode = route.decode
        self.jobs[job.number] = job
        if route.prefill is None:
            self.decode[route.decode].compute(job, self.now)
        else:
            job.prefill = route.prefill
            job.sent = min(self.decode[route.decode].cache.held_tokens(job.prompt_blocks), job.prompt_tokens - 1)
            self.prefill[route.prefill].compute(job, self.now)
        return job

    def advance(self) -> list[tuple[str, int]]:
        """Advance to the next event; return (kind, request) pairs. Empty if no event is left."""
        due = [(engine.due, index) for index, engine in enumerate(self._engines()) if engine.due is not None]
        first = min(due, default=None)
        if first is not None and (not self._heap or first[0] <= self._heap[0][0]):
            self.now = first[0]
            return self._step(self._engines()[first[1]])
        if not self._heap:
            return []
        self.now, _, what, number = heapq.heappop(self._heap)
        if what == "kv":
            job = self.jobs[number]
            self.decode[job.decode].adopt(job, self.now)
        return [(what, number)]

    def engine(self, name: str) -> Engine:
        """Return an engine by its role's first letter and index."""
        return (self.prefill if name[0] == "p" else self.decode)[int(name[1:])]

    def host(self, name: str) -> int:
        """Return the index of an engine's host; the engines of a host share its KV store."""
        return int(name[1:]) % len(self._stores)

    def _store(self, index: int) -> Cache:
        return self._stores[index % len(self._stores)]

    def _engines(self) -> list[Engine]:
        return self.prefill + self.decode

    def _step(self, engine: Engine) -> list[tuple[str, int]]:
        events, chunks = engine.step()
        if engine.role == "prefill":
            for job, _ in chunks:
                self._move(job)
        for event in events:
            job = event.job
            if event.kind == "prefilled":
                self.at(max(self._egress[job.prefill], self.now) + self.hardware.link_overhead_s, "kv", job.number)
            elif event.kind == "done":
                del self.jobs[job.number]
        return [(event.kind, event.job.number) for event in events] or [("step", -1)]

    def _move(self, job: Job) -> None:
        """Transfer computed KV, one request after the other on the sender's link and on the
        receiver's.
        """
        tokens = job.computed - job.sent
        if tokens > 0:
            job.sent = job.computed
            begins_at = max(self.now, self._egress[job.prefill], self._ingress[job.decode])
            ends_at = begins_at + tokens / self.hardware.link_tokens_per_s
            self._egress[job.prefill] = self._ingress[job.decode] = ends_at


@dataclass(frozen=True)
class Outcome:
    """Outcome of one request, in seconds and tokens."""

    number: int
    ttft_s: float
    decode_s: float
    answer_tokens: int
    prompt_tokens: int
    computed_tokens: int
    remote: bool


def replay(load: Load, policy: Policy, begin: Callable[[Load], Fleet]) -> list[Outcome]:
    """Serve a load to its end."""
    fleet = begin(load)
    requests = {request.number: request for request in load.requests}
    followers = {request.after: request for request in load.requests if request.after is not None}
    for request in load.requests:
        if request.after is None:
            fleet.at(request.at_s, "arrival", request.number)
    for when, slowed, by in load.slowdowns:
        fleet.at(when, f"slow {slowed} {by}", -1)
    for when, restarted in load.restarts:
        fleet.at(when, f"restart {restarted}", -1)
    outcomes = []
    sent: dict[int, Job] = {}
    while happened := fleet.advance():
        for what, number in happened:
            if what.startswith("slow "):
                _, engine, factor = what.split()
                fleet.engine(engine).factor = float(factor)
            elif what.startswith("restart "):
                fleet.engine(what.split()[1]).restart()
            if number < 0:
                continue
            request = requests[number]
            if what == "arrival":
                sent[number] = fleet.send(request, policy.route(request, fleet))
                continue
            policy.saw(what, request, fleet)
            if what == "done":
                outcomes.append(_outcome(sent.pop(number)))
                if follower := followers.get(number):
                    fleet.at(fleet.now + follower.at_s, "arrival", follower.number)
    assert not sent, "a request was lost"
    return sorted(outcomes, key=lambda one: one.number)


def _outcome(job: Job) -> Outcome:
    return Outcome(
        job.number,
        job.first_token_at - job.arrived_at,
        job.done_at - job.first_token_at,
        job.answer_tokens,
        job.prompt_tokens,
        job.prompt_tokens - job.held,
        job.prefill >= 0,
    )
