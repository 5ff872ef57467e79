"""Models of a prefill and a decode engine, whose load the product's own code measures.

Not modelled: preemption (a request waits until its prompt and answer fit), prefix caches, chunks of
several prompts in a step, prompts that decode computes itself, the network (a constant), failures.
"""

from collections import deque
from dataclasses import dataclass, field

from actors.autoscaling.load import LoadMeter
from benchmarks.scaling.loads import Arrival


@dataclass(frozen=True)
class Machine:
    """One engine, in the order of an 8B model on one large GPU; no figure is measured."""

    prompt_tokens_per_s: float = 10_000.0
    step_s: float = 0.010  # a decode step without sequences
    step_per_sequence_s: float = 0.0004
    kv_tokens: int = 400_000
    start_s: float = 90.0
    handover_s: float = 0.02
    prefill_places: int = 32  # requests in one replica; more wait in routers
    decode_places: int = 256


@dataclass
class Request:
    arrival: Arrival
    prompt_done_s: float = float("inf")
    first_token_s: float = float("inf")
    ended_s: float = float("inf")
    tokens: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        if self.ended_s == float("inf"):
            return float("inf")
        return (self.ended_s - self.first_token_s) / max(self.arrival.answer_tokens - 1, 1)

    @property
    def kv_tokens(self) -> int:
        return self.arrival.prompt_tokens + self.arrival.answer_tokens


@dataclass
class Replica:
    """A replica, ready at `ready_s`; a stopping one completes its requests."""

    number: int
    ready_s: float
    machine: Machine

    def __post_init__(self) -> None:
        self.stopping = False
        self.load = LoadMeter(self.ready_s)

    @property
    def ongoing(self) -> int:
        raise NotImplementedError

    def stats(self, now_s: float) -> dict[str, float]:
        raise NotImplementedError


@dataclass
class PrefillReplica(Replica):
    """Computes prompts one after the other; a request is ongoing until decode has its KV."""

    queue: deque[Request] = field(default_factory=deque)
    held: list[Request] = field(default_factory=list)
    _free_s: float = 0.0

    @property
    def ongoing(self) -> int:
        return len(self.queue) + len(self.held)

    def take(self, request: Request, now_s: float) -> None:
        computing_s = request.arrival.prompt_tokens / self.machine.prompt_tokens_per_s
        self._free_s = max(self._free_s, now_s) + computing_s
        request.prompt_done_s = self._free_s
        self.queue.append(request)

    def step(self, now_s: float) -> None:
        while self.queue and self.queue[0].prompt_done_s <= now_s:
            request = self.queue.popleft()
            tokens = request.arrival.prompt_tokens
            self.load.prompt(tokens, tokens / self.machine.prompt_tokens_per_s, request.prompt_done_s)
            self.held.append(request)
        self.held = [one for one in self.held if one.first_token_s > now_s]

    def stats(self, now_s: float) -> dict[str, float]:
        return self.load.read(now_s) | {"queued_tokens": float(sum(one.arrival.prompt_tokens for one in self.queue))}


@dataclass
class DecodeReplica(Replica):
    """Advances all its sequences by a token per step, which takes longer the more there are."""

    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    _kv_tokens: int = 0

    @property
    def ongoing(self) -> int:
        return len(self.waiting) + len(self.running)

    def take(self, request: Request) -> None:
        self.waiting.append(request)
        self._admit()

    def _admit(self) -> None:
        while self.waiting and (
            self._kv_tokens + self.waiting[0].kv_tokens <= self.machine.kv_tokens or not self.running
        ):
            request = self.waiting.popleft()
            self._kv_tokens += request.kv_tokens
            self.running.append(request)

    def step(self, now_s: float, dt_s: float) -> list[Request]:
        """Advance from `now_s - dt_s` to `now_s`; return the requests that ended."""
        active = [one for one in self.running if one.prompt_done_s + self.machine.handover_s <= now_s]
        if not active:
            return []
        step_s = self.machine.step_s + self.machine.step_per_sequence_s * len(active)
        self.load.tokens(step_s, now_s, len(active) * dt_s / step_s)
        ended = []
        for request in active:
            if not request.tokens:
                request.first_token_s = now_s + step_s
                request.tokens = 1.0
            else:
                request.tokens += dt_s / step_s
            if request.tokens >= request.arrival.answer_tokens:
                request.ended_s = max(now_s, request.first_token_s)
                ended.append(request)
        if ended:
            gone = {id(one) for one in ended}
            self.running = [one for one in self.running if id(one) not in gone]
            self._kv_tokens -= sum(one.kv_tokens for one in ended)
            self._admit()
        return ended

    def stats(self, now_s: float) -> dict[str, float]:
        return self.load.read(now_s) | {
            "kv_use": min(self._kv_tokens / self.machine.kv_tokens, 1.0),
            "running": float(len(self.running)),
            "waiting": float(len(self.waiting)),
        }
