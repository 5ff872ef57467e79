"""Replay a load against replicas that an autoscaler starts and stops."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from actors.engine_pool.slots import rank
from benchmarks.scaling.autoscaler import Autoscaler, Clock, Policy, simulated_time
from benchmarks.scaling.engines import DecodeReplica, Machine, PrefillReplica, Replica, Request
from benchmarks.scaling.loads import HOUR_S, Load

STEP_S = 0.2
DECIDE_EVERY_S = 2.0  # Serve: ten times per second, from reports at intervals of a few seconds


@dataclass(frozen=True)
class Objective:
    ttft_s: float = 2.0
    tpot_s: float = 0.040


MACHINE = Machine()
OBJECTIVE = Objective()


@dataclass(frozen=True)
class Outcome:
    """Shares of all requests; one that has not ended an hour after the load misses both."""

    requests: int
    ttft_attained: float
    tpot_attained: float
    attained: float
    ttft_p99_s: float
    tpot_p99_s: float
    gpu_hours: float
    changes: int  # decisions that changed a number of replicas


ReplicaT = TypeVar("ReplicaT", bound=Replica)


class Fleet(Generic[ReplicaT]):
    """The replicas of a role, and their cost."""

    def __init__(self, role: str, kind: type[ReplicaT], machine: Machine, slots: int, count: int) -> None:
        self.role, self.slots, self.target = role, slots, count
        self.gpu_s = 0.0
        self.changes = self._next = self._turn = 0
        self._kind, self._machine = kind, machine
        self.replicas: list[ReplicaT] = []
        for _ in range(count):
            self._start(0.0)

    def _start(self, ready_s: float) -> None:
        self.replicas.append(self._kind(self._next, ready_s, self._machine))
        self._next += 1

    def ready(self, now_s: float) -> list[ReplicaT]:
        return [one for one in self.replicas if one.ready_s <= now_s and not one.stopping]

    def scale(self, target: int, now_s: float) -> None:
        """Start replicas, or stop some: as Serve does those not ready first, then the idlest."""
        self.changes += target != self.target
        self.target = target
        there = [one for one in self.replicas if not one.stopping]
        for _ in range(target - len(there)):
            self._start(now_s + self._machine.start_s)
        there.sort(key=lambda one: (one.ready_s <= now_s, one.ongoing))
        for one in there[: max(len(there) - target, 0)]:
            one.stopping = True

    def choose(self, now_s: float) -> ReplicaT | None:
        """Choose a replica by the routing rule: fewest ongoing requests, in turn among equals."""
        free = {str(one.number): one for one in self.ready(now_s) if one.ongoing < self.slots}
        if not free:
            return None
        self._turn += 1
        return free[rank({name: one.ongoing for name, one in free.items()}, self._turn)[0]]

    def pay(self, dt_s: float) -> None:
        """A GPU is paid for from the start of its engine to the end of its last request."""
        self.replicas = [one for one in self.replicas if not (one.stopping and not one.ongoing)]
        self.gpu_s += dt_s * len(self.replicas)


class Simulation:
    """A load replayed against two fleets under one policy."""

    def __init__(
        self, load: Load, policy: Policy, config: Mapping[str, Any], machine: Machine = MACHINE, step_s: float = STEP_S
    ) -> None:
        self._load, self._clock, self._step_s = load, Clock(), step_s
        with simulated_time(self._clock):
            self._autoscaler = Autoscaler(policy, config, self._clock)
        fewest = config["min_replicas"]
        self.prefill = Fleet("Prefill", PrefillReplica, machine, machine.prefill_places, fewest)
        self.decode = Fleet("Decode", DecodeReplica, machine, machine.decode_places, fewest)
        self.requests: list[Request] = []
        self._queue: deque[Request] = deque()

    def play(self) -> Outcome:
        """Replay all of the load, and continue until every request has ended."""
        for _ in self.steps():
            pass
        return self.outcome()

    def steps(self) -> Iterator[float]:
        """Replay the load; yield the time after each step."""
        arrivals = deque(self._load.arrivals)
        steps, ended = 0, 0
        with simulated_time(self._clock):
            while arrivals or ended < len(self.requests):
                steps += 1
                now_s = self._clock.now_s = steps * self._step_s
                if now_s > self._load.duration_s + HOUR_S:
                    break
                while arrivals and arrivals[0].at_s <= now_s:
                    request = Request(arrivals.popleft())
                    self.requests.append(request)
                    self._queue.append(request)
                self._dispatch(now_s)
                for prefill in self.prefill.replicas:
                    prefill.step(now_s)
                for decode in self.decode.replicas:
                    ended += len(decode.step(now_s, self._step_s))
                for fleet in (self.prefill, self.decode):
                    fleet.pay(self._step_s)
                self._serve(steps, now_s)
                yield now_s

    def _dispatch(self, now_s: float) -> None:
        while self._queue:
            prefill, decode = self.prefill.choose(now_s), self.decode.choose(now_s)
            if prefill is None or decode is None:
                return
            request = self._queue.popleft()
            decode.take(request)
            prefill.take(request, now_s)

    def _serve(self, steps: int, now_s: float) -> None:
        scaler = self._autoscaler
        fleets: tuple[Fleet[Any], ...] = (self.prefill, self.decode)
        for fleet in fleets:
            running = [one.number for one in fleet.ready(now_s)]
            if self._due(steps, scaler.record_every_s):
                ready = fleet.ready(now_s)
                scaler.record(
                    fleet.role,
                    len(self._queue) if fleet.choose(now_s) is None else 0,
                    {one.number: one.ongoing for one in ready},
                    {one.number: one.stats(now_s) for one in ready},
                )
            if self._due(steps, scaler.push_every_s):
                scaler.push(fleet.role, running)
            elif self._due(steps, DECIDE_EVERY_S):
                scaler.knows(fleet.role, running)
        if self._due(steps, DECIDE_EVERY_S):
            decided = scaler.decide({fleet.role: fleet.target for fleet in fleets})
            for fleet in fleets:
                fleet.scale(decided[fleet.role], now_s)

    def _due(self, steps: int, every_s: float) -> bool:
        return steps % round(every_s / self._step_s) == 0

    def outcome(self) -> Outcome:
        ttft = np.array([one.ttft_s for one in self.requests])
        tpot = np.array([one.tpot_s for one in self.requests])
        in_time, fast = ttft <= OBJECTIVE.ttft_s, tpot <= OBJECTIVE.tpot_s
        return Outcome(
            requests=len(self.requests),
            ttft_attained=float(in_time.mean()),
            tpot_attained=float(fast.mean()),
            attained=float((in_time & fast).mean()),
            ttft_p99_s=_percentile(ttft, 99),
            tpot_p99_s=_percentile(tpot, 99),
            gpu_hours=(self.prefill.gpu_s + self.decode.gpu_s) / HOUR_S,
            changes=self.prefill.changes + self.decode.changes,
        )


def _percentile(values: Sequence[float] | np.ndarray, which: float) -> float:
    return float(np.percentile(values, which, method="higher"))
