"""Synthetic loads from a seed: arrivals, shared prefixes of prompts, and lengths of answers."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from actors.policy.prompts import Prompt, passage
from benchmarks.routing.machine import BLOCK_TOKENS, CPU, GPU, Hardware

TEXT_BYTES_PER_TOKEN = 4.3


@dataclass(frozen=True)
class Segment:
    """A piece of text; equal pieces have equal ids."""

    number: int
    tokens: int

    @property
    def data(self) -> bytes:
        # The text as the router sees it, with its own number of bytes per token.
        dice = random.Random(self.number)
        return dice.randbytes(round(self.tokens * dice.gauss(TEXT_BYTES_PER_TOKEN, 0.3)))


@dataclass(frozen=True)
class Request:
    """A request; `at_s` counts from the beginning, or from the end of the request `after`."""

    number: int
    at_s: float
    prompt: tuple[Segment, ...]
    answer: Segment
    effort: float
    after: int | None = None

    @cached_property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)

    @property
    def answer_tokens(self) -> int:
        return self.answer.tokens

    @cached_property
    def blocks(self) -> Sequence[int]:
        """Return the chained hashes of the blocks of prompt and answer, as in an engine's cache."""
        starts, at = [], 0
        for segment in (*self.prompt, self.answer):
            starts.append((at, segment))
            at += segment.tokens
        found, before = [], 0
        for end in range(BLOCK_TOKENS, at + 1, BLOCK_TOKENS):
            inside = tuple(
                (segment.number, max(end - BLOCK_TOKENS - start, 0))
                for start, segment in starts
                if start < end and start + segment.tokens > end - BLOCK_TOKENS
            )
            before = hash((before, inside))
            found.append(before)
        return found

    @cached_property
    def seen(self) -> Prompt:
        return Prompt((passage(b"".join(segment.data for segment in self.prompt), ids=False, seed=0),))


@dataclass(frozen=True)
class Load:
    name: str
    hardware: Hardware
    prefill: int
    decode: int
    requests: tuple[Request, ...]
    factors: dict[str, float]  # on the times of engines
    slowdowns: tuple[tuple[float, str, float], ...] = ()  # time, engine, its new factor
    stored_tokens: int = 0  # room in the KV store of each host; 0: none
    hosts: int = 1  # engine n of a role is on host n modulo this number
    restarts: tuple[tuple[float, str], ...] = ()  # times at which engines lose their prefix caches


class Maker:
    """Source of random requests. Lengths are lognormal: most are short, some are long."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.requests: list[Request] = []
        self._segments = seed * 10_000_000

    def segment(self, tokens: float) -> Segment:
        self._segments += 1
        return Segment(self._segments, max(round(tokens), 1))

    def length(self, median: float, spread: float, most: float) -> float:
        return min(median * math.exp(self.dice.gauss(0, spread)), most)

    def ask(self, at_s: float, prompt: tuple[Segment, ...], answer_tokens: float, after: int | None = None) -> Request:
        effort = math.exp(self.dice.gauss(0, 0.1))
        request = Request(len(self.requests), at_s, prompt, self.segment(answer_tokens), effort, after)
        self.requests.append(request)
        return request

    def arrivals(self, count: int, per_s: float) -> list[float]:
        at, times = 0.0, []
        for _ in range(count):
            at += self.dice.expovariate(per_s)
            times.append(at)
        return times


def short_chat(seed: int) -> Load:
    """Short questions, answers of a few hundred tokens."""
    make = Maker(seed)
    for at_s in make.arrivals(400, 20.0):
        make.ask(at_s, (make.segment(make.length(150, 0.7, 1500)),), make.length(180, 0.5, 600))
    return Load("short chat", GPU, 2, 2, tuple(make.requests), {"p1": 1.15})


def long_documents(seed: int) -> Load:
    """Prompts of thousands of tokens, answers of a summary's length."""
    make = Maker(seed)
    for at_s in make.arrivals(300, 5.0):
        make.ask(at_s, (make.segment(make.length(6000, 0.6, 30_000)),), make.length(150, 0.4, 400))
    return Load("long documents", GPU, 2, 2, tuple(make.requests), {"p1": 1.15})


def _mixed(make: Maker, times: list[float]) -> None:
    for at_s in times:
        if make.dice.random() < 0.25:
            make.ask(at_s, (make.segment(make.length(6000, 0.6, 30_000)),), make.length(150, 0.4, 400))
        else:
            make.ask(at_s, (make.segment(make.length(150, 0.7, 1500)),), make.length(180, 0.5, 600))


def mixed(seed: int) -> Load:
    """Three chats per document."""
    make = Maker(seed)
    _mixed(make, make.arrivals(400, 16.0))
    return Load("mixed", GPU, 2, 2, tuple(make.requests), {"d1": 1.1})


def bursts(seed: int) -> Load:
    """The mixed load in bursts of four seconds, six times as dense as the ten seconds between."""
    make = Maker(seed)
    times, at, until = [], 0.0, 0.0
    for burst in range(12):
        until += 4.0 if burst % 2 else 10.0
        while (at := at + make.dice.expovariate(30.0 if burst % 2 else 5.0)) < until:
            times.append(at)
        at = until
    _mixed(make, times[:420])
    return Load("bursts", GPU, 2, 2, tuple(make.requests), {})


def ill_engine(seed: int) -> Load:
    """The mixed load; for some seconds, a prefill engine is four times as slow, a decode twice."""
    make = Maker(seed)
    _mixed(make, make.arrivals(400, 12.0))
    slow = ((8.0, "p0", 4.0), (18.0, "p0", 1.0), (20.0, "d0", 2.0), (28.0, "d0", 1.0))
    return Load("a degraded engine", GPU, 2, 2, tuple(make.requests), {}, slow)


def _conversation(make: Maker, at_s: float, prompt: tuple[Segment, ...], turns: int, pause_s: float) -> None:
    before = None
    for turn in range(turns):
        wait_s = make.dice.expovariate(1 / pause_s) if turn else at_s
        request = make.ask(wait_s, prompt, make.length(180, 0.5, 500), before)
        before = request.number
        prompt = (*prompt, request.answer, make.segment(make.length(120, 0.6, 1000)))


def multi_turn(seed: int) -> Load:
    """Conversations of up to six turns with one of four system prompts."""
    make = Maker(seed)
    systems = [make.segment(600) for _ in range(4)]
    for at_s in make.arrivals(90, 2.0):
        prompt = make.dice.choice(systems), make.segment(make.length(800, 0.8, 6000))
        _conversation(make, at_s, prompt, make.dice.randint(2, 6), 6.0)
    return Load("multi-turn", replace(GPU, cache_tokens=200_000), 2, 3, tuple(make.requests), {})


def shared_prompts(seed: int) -> Load:
    """Forty system prompts, a few of them frequent; no engine has room for all."""
    make = Maker(seed)
    systems = [make.segment(make.length(3500, 0.3, 8000)) for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    for at_s in make.arrivals(400, 16.0):
        system = make.dice.choices(systems, weights)[0]
        make.ask(at_s, (system, make.segment(make.length(150, 0.5, 800))), make.length(120, 0.4, 400))
    hardware = replace(GPU, cache_tokens=60_000)
    return Load("shared system prompts", hardware, 3, 2, tuple(make.requests), {})


def stored_conversations(seed: int) -> Load:
    """Conversations about long documents, half a minute between turns, during a rolling restart.

    Each of two hosts has a KV store, two prefill engines and one decode engine. Engines restart
    twice.
    """
    make = Maker(seed)
    for at_s in make.arrivals(80, 1.0):
        _conversation(make, at_s, (make.segment(make.length(8000, 0.6, 30_000)),), make.dice.randint(3, 6), 30.0)
    hardware = replace(GPU, cache_tokens=200_000)
    engines = [*(f"p{n}" for n in range(4)), "d0", "d1"]
    restarts = tuple((at_s + n, engine) for at_s in (60.0, 120.0) for n, engine in enumerate(engines))
    requests, stored = tuple(make.requests), 8_000_000
    return Load("conversations in stores", hardware, 4, 2, requests, {}, (), stored, hosts=2, restarts=restarts)


def small_machine(seed: int) -> Load:
    """One prefill and one decode engine on a CPU, a hundred times slower than assumed."""
    make = Maker(seed)
    for at_s in make.arrivals(150, 0.45):
        make.ask(at_s, (make.segment(make.length(250, 0.9, 1800)),), make.length(40, 0.5, 120))
    return Load("two CPU engines", CPU, 1, 1, tuple(make.requests), {})


LOADS = (
    *(short_chat, long_documents, mixed, bursts, ill_engine),
    *(multi_turn, shared_prompts, stored_conversations, small_machine),
)
