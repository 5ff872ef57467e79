"""Models of engines, links and caches, independent of the policy that they judge.

A step of an engine computes one token of every running answer and, within its token budget, pieces
of the waiting prompts, first come, first served. It takes the sum of its parts, times the engine's
own factor. The policy observes only the ends of stages, like a router.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Hardware:
    step_s: float
    prefill_token_s: float
    attention_s: float  # of each pair of a new token and an earlier one
    decode_sequence_s: float
    decode_context_token_s: float
    budget_tokens: int
    max_sequences: int
    cache_tokens: int
    link_tokens_per_s: float
    link_overhead_s: float
    load_tokens_per_s: float = 80_000.0  # from the engine's KV store


GPU = Hardware(
    step_s=0.006,
    prefill_token_s=4.0e-5,
    attention_s=1.2e-9,
    decode_sequence_s=2.5e-5,
    decode_context_token_s=4.3e-8,
    budget_tokens=2048,
    max_sequences=256,
    cache_tokens=400_000,
    link_tokens_per_s=160_000.0,
    link_overhead_s=0.004,
)
"""An 8B model on one large GPU, 20 GB/s between engines, 10 GB/s from a KV store.

The values have the order of magnitude of public reports; none is measured.
"""

CPU = Hardware(
    step_s=0.028,
    prefill_token_s=1.5e-3,
    attention_s=1.5e-7,
    decode_sequence_s=4.0e-3,
    decode_context_token_s=2.0e-6,
    budget_tokens=256,
    max_sequences=16,
    cache_tokens=40_000,
    link_tokens_per_s=60_000.0,
    link_overhead_s=0.003,
)
"""The demo's engines on two cores.

Step, prefill and handover as in benchmarks/results/handover.json; the other values are estimates.
"""


class Cache:
    """Block hashes, least recently used dropped first. A fork does not change it."""

    def __init__(self, blocks: int, parent: Cache | None = None) -> None:
        self._most = blocks
        self._parent = parent
        self._held: OrderedDict[int, None] = OrderedDict()

    def fork(self) -> Cache:
        return Cache(self._most, self)

    def held_tokens(self, blocks: Sequence[int]) -> int:
        """Return the length of the longest cached prefix."""
        count = 0
        for block in blocks:
            if block not in self:
                break
            count += 1
        return count * BLOCK_TOKENS

    def add(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)
        while self._parent is None and len(self._held) > self._most:
            self._held.popitem(last=False)

    def __contains__(self, block: int) -> bool:
        return block in self._held or (self._parent is not None and block in self._parent)


@dataclass
class Job:
    number: int
    prompt_tokens: int
    answer_tokens: int
    blocks: Sequence[int]  # of the prompt and the answer
    effort: float  # of computing this prompt, relative to the usual one
    arrived_at: float
    computed: int = -1  # prompt tokens with KV; -1 before the cache lookup
    held: int = 0  # cached or stored ones of these tokens
    decode: int = -1
    prefill: int = -1
    sent: int = 0  # prompt tokens whose KV decode has or is receiving
    first_token_at: float = -1.0
    done_at: float = -1.0

    def __post_init__(self) -> None:
        self.left = self.answer_tokens

    def fork(self) -> Job:
        copy = Job.__new__(Job)
        copy.__dict__.update(self.__dict__)
        return copy

    @property
    def prompt_blocks(self) -> Sequence[int]:
        return self.blocks[: self.prompt_tokens // BLOCK_TOKENS]


class Engine:
    """One engine. `due` is the end of its running step, or None while it is idle.

    A load from the KV store takes part of a step: a pessimistic model, since real loads delay only
    their own request.
    """

    MOST_STEPS_AT_ONCE = 16  # without prompts; they count as one event, if no request arrives

    def __init__(self, hardware: Hardware, role: str, factor: float, store: Cache) -> None:
        self.hardware, self.role, self.factor, self.store = hardware, role, factor, store
        self.cache = Cache(hardware.cache_tokens // BLOCK_TOKENS)
        self.restarts = 0
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.due: float | None = None
        self._began_at = 0.0
        self._steps = 0
        self._step_s = 0.0
        self._chunks: list[tuple[Job, int]] = []
        self._decoding = 0

    def fork(self, jobs: dict[int, Job], store: Cache) -> Engine:
        copy = Engine.__new__(Engine)
        copy.__dict__.update(self.__dict__)
        copy.cache, copy.store = self.cache.fork(), store
        copy.waiting = [jobs[job.number] for job in self.waiting]
        copy.running = [jobs[job.number] for job in self.running]
        copy._chunks = [(jobs[job.number], tokens) for job, tokens in self._chunks]
        return copy

    def compute(self, job: Job, now: float) -> None:
        self.waiting.append(job)
        self._wake(now)

    def adopt(self, job: Job, now: float) -> None:
        job.computed = job.prompt_tokens
        self.running.append(job)
        self._keep(job.prompt_blocks)
        self._wake(now)

    def restart(self) -> None:
        """Empty the prefix cache, as a new process has it. The store stays."""
        self.cache = Cache(self.hardware.cache_tokens // BLOCK_TOKENS)
        self.restarts += 1

    def _keep(self, blocks: Sequence[int]) -> None:
        self.cache.add(blocks)
        self.store.add(blocks)

    def step(self) -> tuple[list[tuple[str, Job]], list[tuple[Job, int]]]:
        """End the step; return its events, and the prompt tokens that it has computed."""
        assert self.due is not None
        now, events = self.due, list[tuple[str, Job]]()
        finished: list[Job] = []
        chunks, self._chunks = self._chunks, []

        def sampled(job: Job, tokens: int) -> None:
            if job.first_token_at < 0:
                job.first_token_at = now
                events.append(("first", job))
            job.left -= tokens
            if job.left <= 0:
                job.done_at = now
                finished.append(job)

        for job in self.running[: self._decoding]:
            sampled(job, self._steps)
        for job, tokens in chunks:
            job.computed += tokens
            if job.computed >= job.prompt_tokens:
                self.waiting.remove(job)
                self._keep(job.prompt_blocks)
                if self.role == "prefill":
                    events.append(("prefilled", job))
                else:
                    sampled(job, 1)
                    if job.left > 0:
                        self.running.append(job)
        for job in finished:
            self._keep(job.blocks)
            events.append(("done", job))
        if finished:
            gone = {job.number for job in finished}
            self.running = [job for job in self.running if job.number not in gone]
        self.due = None
        self._begin(now)
        return events, chunks

    def _wake(self, now: float) -> None:
        if self.due is None:
            self._begin(now)
        elif self._steps > 1:
            # A new request takes part from the next step on, not only after the steps counted
            # ahead.
            over = max(int((now - self._began_at) / self._step_s) + 1, 1)
            self._steps = min(self._steps, over)
            self.due = self._began_at + self._steps * self._step_s

    def _begin(self, now: float) -> None:
        hardware = self.hardware
        decoding = self.running[: hardware.max_sequences] if self.role == "decode" else []
        budget = hardware.budget_tokens - len(decoding)
        room = hardware.max_sequences - len(decoding)
        seconds = 0.0
        for job in self.waiting:
            if budget <= 0 or room <= 0:
                break
            if job.computed < 0:
                cached, stored = (
                    min(each.held_tokens(job.prompt_blocks), job.prompt_tokens - 1) for each in (self.cache, self.store)
                )
                seconds += max(stored - cached, 0) / hardware.load_tokens_per_s
                job.held = job.computed = max(cached, stored)
            tokens = min(budget, job.prompt_tokens - job.computed)
            context = job.computed + tokens / 2
            seconds += job.effort * tokens * (hardware.prefill_token_s + hardware.attention_s * context)
            self._chunks.append((job, tokens))
            budget -= tokens
            room -= 1
        if not decoding and not self._chunks:
            return
        seconds += hardware.step_s + hardware.decode_sequence_s * len(decoding)
        contexts = sum(job.prompt_tokens + job.answer_tokens - job.left for job in decoding)
        seconds += hardware.decode_context_token_s * contexts
        steps = 1
        if decoding and not self._chunks and all(job.first_token_at >= 0 for job in decoding):
            steps = max(min(min(job.left for job in decoding), self.MOST_STEPS_AT_ONCE), 1)
        self._decoding = len(decoding)
        self._began_at, self._steps, self._step_s = now, steps, seconds * self.factor
        self.due = now + steps * self._step_s
