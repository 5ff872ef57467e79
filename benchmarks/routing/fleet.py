"""Simulate a fleet over time: arrivals, engine steps and transfers, in order of time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

from benchmarks.routing.loads import Load, Request
from benchmarks.routing.machine import BLOCK_TOKENS, Cache, Engine, Job


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
    """State of the simulation of a load, idle at first. `fork` copies it, to simulate ahead."""

    def __init__(self, load: Load) -> None:
        self.hardware, self.stored_tokens, self.now = load.hardware, load.stored_tokens, 0.0
        self._stores = [Cache(load.stored_tokens // BLOCK_TOKENS) for _ in range(load.hosts)]
        self.prefill, self.decode = (
            [Engine(load.hardware, role, load.factors.get(f"{role[0]}{n}", 1.0), self._store(n)) for n in range(count)]
            for role, count in (("prefill", load.prefill), ("decode", load.decode))
        )
        self.jobs: dict[int, Job] = {}  # all requests that have not ended
        self._egress = [0.0] * load.prefill
        self._ingress = [0.0] * load.decode
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
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, what, number))

    def upcoming(self, what: str) -> list[tuple[float, int]]:
        """Return (time, number) of the scheduled events of kind `what`, in order."""
        return sorted((when, number) for when, _, kind, number in self._heap if kind == what)

    def send(self, request: Request, route: Route) -> Job:
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
        engines = self.prefill + self.decode
        due = [(engine.due, index) for index, engine in enumerate(engines) if engine.due is not None]
        first = min(due, default=None)
        if first is not None and (not self._heap or first[0] <= self._heap[0][0]):
            self.now = first[0]
            return self._step(engines[first[1]])
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

    def _step(self, engine: Engine) -> list[tuple[str, int]]:
        events, chunks = engine.step()
        if engine.role == "prefill":
            for job, _ in chunks:
                self._move(job)
        for kind, job in events:
            if kind == "prefilled":
                self.at(max(self._egress[job.prefill], self.now) + self.hardware.link_overhead_s, "kv", job.number)
            elif kind == "done":
                del self.jobs[job.number]
        return [(kind, job.number) for kind, job in events] or [("step", -1)]

    def _move(self, job: Job) -> None:
        # One request after the other, on the sender's link and on the receiver's.
        tokens = job.computed - job.sent
        if tokens > 0:
            job.sent = job.computed
            begins_at = max(self.now, self._egress[job.prefill], self._ingress[job.decode])
            ends_at = begins_at + tokens / self.hardware.link_tokens_per_s
            self._egress[job.prefill] = self._ingress[job.decode] = ends_at


@dataclass(frozen=True)
class Outcome:
    number: int
    ttft_s: float
    decode_s: float
    answer_tokens: int
    prompt_tokens: int
    computed_tokens: int
    remote: bool


def replay(load: Load, policy: Policy) -> list[Outcome]:
    fleet = Fleet(load)
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
                job = sent.pop(number)
                times = job.first_token_at - job.arrived_at, job.done_at - job.first_token_at
                computed = job.prompt_tokens - job.held
                outcomes.append(
                    Outcome(number, *times, job.answer_tokens, job.prompt_tokens, computed, job.prefill >= 0)
                )
                if follower := followers.get(number):
                    fleet.at(fleet.now + follower.at_s, "arrival", follower.number)
    assert not sent, "a request was lost"
    return sorted(outcomes, key=lambda one: one.number)
