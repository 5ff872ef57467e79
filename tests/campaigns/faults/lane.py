"""One pair of servers, one fault at a time: requests in flight, the fault, and the outcomes.

Several lanes may share a machine: most of a fault's time is spent on deadlines.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from testing.ports import free_port
from testing.servers import MODEL, POOL_BLOCKS, Server
from testing.trace import read_trace
from tests.campaigns.faults import references
from tests.campaigns.faults.judge import Case, Outcome, Pool, findings, judge, late
from tests.campaigns.faults.presets import Connector
from tests.campaigns.faults.questions import Questions
from tests.campaigns.faults.schedule import Fault, Injection
from tests.campaigns.faults.trials import Router, Trial

START_S = 240.0
LOOK_EVERY_S = 0.9

Sizes = tuple[int, int]
SELF_END_S = 15.0
"""Time for an engine that has lost a process to end by itself."""

_TROUBLE = re.compile(r"(Error|Exception|expired|timed out|Segmentation|assert|Fatal|NIXL_ERR|quarantine)")


@dataclass
class Lane:
    """Pair of servers into which a campaign injects faults, and the requests through both.

    ``address``  prefill's answer to ``describe``, for connectors that accept both legs at once
    """

    connector: Connector
    folder: Path
    questions: Questions
    client: httpx.AsyncClient
    tp: Sizes = (1, 1)
    prefill_tokens_per_s: float = 2000.0
    address: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, int] = field(default_factory=dict)
    replaced_at: dict[str, float] = field(default_factory=dict)
    targets: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.trace = self.folder / "trace.jsonl"
        self.trace.touch()
        sides = (("prefill", "producer"), ("decode", "consumer"))
        self.servers = {}
        for (name, role), tp_size in zip(sides, self.tp, strict=True):
            transfer, environment = self.connector.server_arguments(role, free_port(), self.trace)
            self.servers[name] = Server(name, free_port(), tp_size, self.folder, transfer, environment)
        self.prefill, self.decode = self.servers["prefill"], self.servers["decode"]
        self.router = Router(self.client, self.prefill.url, self.decode.url, self.connector.bound_s)

    # ---- servers --------------------------------------------------------------------------------

    async def start(self, *names: str) -> None:
        """Start or replace servers, and wait until they answer. The pair is not connected yet."""
        for name in names:
            await asyncio.to_thread(self.servers[name].destroy)
            self.servers[name].start()
        for name in names:
            await asyncio.to_thread(self.servers[name].wait_until_up, START_S)
            self.servers[name].find_members()
            self.baseline[name] = await self._used(name)
            self.replaced_at[name] = time.monotonic()
        if "prefill" in names and self.connector.together:
            self.address = await self._describe()

    async def _describe(self) -> dict[str, Any]:
        params = {"do_remote_decode": True, "describe": True}
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "kv_transfer_params": params}
        url = f"{self.prefill.url}/v1/completions"
        answer = await self.client.post(url, json=body, timeout=30)
        found: dict[str, Any] = answer.raise_for_status().json()["kv_transfer_params"]
        return found

    async def _used(self, name: str) -> int:
        """Return the number of blocks in use.

        Sends a short request first, because an idle engine does not update its gauge.
        """
        server = self.servers[name]
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "temperature": 0}
        answer = await self.client.post(f"{server.url}/v1/completions", json=body, timeout=5)
        answer.raise_for_status()
        text = (await self.client.get(f"{server.url}/metrics", timeout=5)).text
        (usage,) = re.findall(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", text, re.MULTILINE)
        return round(float(usage) * POOL_BLOCKS)

    def destroy(self) -> None:
        for server in self.servers.values():
            server.destroy()

    # ---- a fault --------------------------------------------------------------------------------

    async def play(self, fault: Injection) -> dict[str, Any]:
        """Inject one fault, or two, and return the case; afterwards both engines work, replaced
        if necessary.
        """
        rng = random.Random(fault.seed)
        self.targets = set()
        logs = {server.log: server.log.stat().st_size for server in self.servers.values()}
        traced_from = self.trace.stat().st_size
        started = time.monotonic()
        if fault.first.phase == "handshake":
            await self.start(rng.choice(("prefill", "decode")))
        trials: list[Trial] = []
        record: dict[str, Any] = {}
        self.repair = asyncio.ensure_future(_nothing())
        try:
            if fault.family == "reference":
                await self._reference(fault.first, rng, trials)
            else:
                await self._strike(fault, rng, trials, traced_from)
        except references.NotApplicable as reason:
            return {"not_applicable": str(reason)}
        case = await self._aftermath(fault, trials)
        record |= await self.repair
        judged = [(trial, judge(trial)) for trial in trials]
        record |= {
            "outcomes": {str(outcome): count for outcome, count in case.outcomes.items() if count},
            "findings": findings(case),
            "late": late(case),
            "seconds": round(time.monotonic() - started, 1),
            "failures": [_told(trial, outcome) for trial, outcome in judged if outcome is not Outcome.RIGHT],
        }
        if record["findings"]:
            record["logs"] = [line for log, size in logs.items() for line in _troubles(log, size)]
            await self.start("prefill", "decode")
        return record

    async def _reference(self, fault: Fault, rng: random.Random, trials: list[Trial]) -> None:
        def start(trial: Trial, work: Awaitable[None]) -> asyncio.Task[None]:
            trials.append(trial)
            return asyncio.ensure_future(work)

        async def restart_prefill() -> None:
            self.targets.add("prefill")
            await self.start("prefill")

        asked = [*self.questions.twins(rng), *self.questions.some(rng, 3)]
        await references.send(
            fault.variant, self.router, asked, rng, self.connector.lease_s, restart_prefill, self.prefill.port, start
        )

    async def _strike(self, fault: Injection, rng: random.Random, trials: list[Trial], traced_from: int) -> None:
        long = fault.first.phase in ("chunks", "transfer")
        subject = Trial(self.questions.some(rng, 1, 700 if long else 0)[0])
        released = asyncio.Event()

        async def between(trial: Trial) -> dict[str, Any] | None:
            if fault.first.phase == "between":
                await released.wait()
            return trial.params

        queued = fault.first.phase == "queued"
        company = [
            Trial(question)
            for question in self.questions.some(rng, 4 if queued else rng.choice((1, 2, 3)), 700 if queued else 0)
        ]
        trials += [*company, subject]
        work = [asyncio.ensure_future(self._go(trial, rng.random() < 0.5)) for trial in company]
        if not queued:
            await asyncio.sleep(rng.uniform(0, 0.3))
        at_once = fault.first.at_once and self.connector.together
        leading = asyncio.ensure_future(self._go(subject, True) if at_once else self.router.in_turn(subject, between))
        work.append(leading)
        await self._moment(fault, subject, traced_from)
        struck = list[tuple[Fault, float]]()
        for step, after_s in fault.steps:
            await asyncio.sleep(after_s)
            struck.append((step, time.monotonic()))
            if step.family == "cancel":
                for task in work if step.variant else [leading]:
                    task.cancel()
            elif step.family != "none":
                await self._break(step, rng, released, trials, work)
        if any(step.family in ("kill", "stop") for step, _ in struck):
            self.repair = asyncio.ensure_future(self._mend(struck, rng))
        released.set()
        await _settled(work)

    async def _go(self, trial: Trial, at_once: bool) -> None:
        if at_once and self.connector.together:
            await self.router.at_once(trial, self.address)
        else:
            await self.router.in_turn(trial)

    async def _moment(self, struck: Injection, subject: Trial, traced_from: int) -> None:
        """Return in the fault's phase of the subject's life, as far as it can be observed."""
        fault = struck.first
        computing_s = subject.question.prompt_tokens / self.prefill_tokens_per_s
        event, delay_s = {
            "queued": ("prefill_sent", 0.05 * fault.at),
            "chunks": ("prefill_sent", (0.1 + 0.8 * fault.at) * computing_s),
            "between": ("prefill_answered", 0.2 * fault.at),
            "handshake": ("decode_sent", 0.3 * fault.at),
            "offering": ("decode_sent", 0.015 * fault.at),
            "transfer": ("decode_sent", 0.06 * fault.at),
            "decoding": ("first_token", 0.1 * fault.at),
        }[fault.phase]
        by_trace = fault.phase == "transfer" and self.connector.traces
        while not subject.ended:
            if by_trace and self._writing(subject, traced_from):
                return
            if not by_trace and event in subject.timestamps:
                await asyncio.sleep(max(0.0, subject.timestamps[event] + delay_s - time.monotonic()))
                return
            await asyncio.sleep(0.002)

    def _writing(self, subject: Trial, traced_from: int) -> bool:
        transfer = (subject.params or {}).get("transfer_id", subject.trial_id)
        events = read_trace(self.trace, traced_from)
        return any(event["event"] == "write" and event["transfer"] == transfer for event in events)

    async def _break(
        self,
        fault: Fault,
        rng: random.Random,
        released: asyncio.Event,
        trials: list[Trial],
        work: list[asyncio.Task[None]],
    ) -> None:
        """Kill or stop, and send more requests meanwhile."""
        number = signal.SIGKILL if fault.family == "kill" else signal.SIGSTOP
        self.servers[fault.target].signal(fault.part, number)
        if fault.family == "stop" and fault.target == "decode":
            self.router.pause()
        released.set()
        more = [Trial(question) for question in self.questions.some(rng, 2)]
        trials += more
        await asyncio.sleep(rng.uniform(0, 0.2))
        work += [asyncio.ensure_future(self._go(trial, rng.random() < 0.5)) for trial in more]

    async def _mend(self, struck: Sequence[tuple[Fault, float]], rng: random.Random) -> dict[str, Any]:
        """Continue stopped servers at their time, then replace lost servers.

        Return the notes for the report.
        """
        told: dict[str, Any] = {}
        lasting = [fault for fault, _ in struck if fault.family == "kill" or _stays_stopped(fault)]
        self.targets |= {fault.target for fault in lasting}
        passing = [(at + fault.resume_s, fault) for fault, at in struck if fault.resume_s is not None]
        try:
            for at, fault in sorted(passing, key=lambda each: each[0]):
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                assert fault.resume_s is not None
                self.servers[fault.target].signal(fault.part, signal.SIGCONT)
                told.setdefault("resumed_after_s", round(fault.resume_s, 1))
            if "decode" not in self.targets:
                self.router.resume()
            for fault in lasting:
                told |= await self._before_replacing(fault, rng)
            if lasting:
                await self.start(*sorted({fault.target for fault in lasting}))
            return told
        finally:
            self.router.resume()

    async def _before_replacing(self, fault: Fault, rng: random.Random) -> dict[str, Any]:
        """Leave a server unchanged for as long as its connector may need to detect the fault."""
        server = self.servers[fault.target]
        if fault.family == "stop":
            # Long enough to see whether decode ends its requests without a message of a stopped
            # prefill.
            await asyncio.sleep(self.connector.bound_s + 3 if fault.target == "prefill" else 5.0)
        elif fault.part == "tree":
            await asyncio.sleep(rng.uniform(0.2, 2.0))
        else:
            await asyncio.to_thread(server.wait_end, SELF_END_S)
            return {"server_ended_by_itself": server.has_ended}
        return {}

    # ---- afterwards -----------------------------------------------------------------------------

    async def _aftermath(self, fault: Injection, trials: list[Trial]) -> Case:
        """Check the pools, then the processes, then a probe through both engines."""
        outcomes = Counter(map(judge, trials))
        last = max((trial.timestamps["ended"] for trial in trials), default=time.monotonic())
        victims = {step.target for step, _ in fault.steps}
        watched = [asyncio.ensure_future(self.pool(name, last)) for name in self.servers if name not in victims]
        await self.repair
        # A replaced victim has a new pool; a stopped one must return to its old baseline.
        watched += [
            asyncio.ensure_future(self.pool(name, time.monotonic())) for name in self.servers if name in victims
        ]
        pools = await asyncio.gather(*watched)
        dead = self._dead()
        probes = []
        if not dead:
            for question in self.questions.some(random.Random(len(trials)), 2):
                trial = Trial(question)
                await self.router.in_turn(trial)
                probes.append(judge(trial))
                self._learn_speed(trial)
            dead = self._dead()
        return Case(outcomes, dead, [pool for pool in pools if pool.engine not in dead], probes)

    def _dead(self) -> frozenset[str]:
        """Check that a server killed by the campaign runs again."""
        return frozenset(name for name, server in self.servers.items() if not server.alive())

    def _learn_speed(self, trial: Trial) -> None:
        if trial.question.prompt_tokens > 500 and "prefill_answered" in trial.timestamps:
            took_s = trial.timestamps["prefill_answered"] - trial.timestamps["prefill_sent"]
            self.prefill_tokens_per_s = trial.question.prompt_tokens / took_s

    async def pool(self, name: str, last: float) -> Pool:
        """Watch one engine's pool until it is at its baseline, or held for too long."""
        held, silent = 0, False
        while self.servers[name].alive():
            try:
                blocks = await self._used(name) - self.baseline[name]
                silent = False
            except httpx.HTTPError:
                blocks, silent = max(held, 1), True
            now = time.monotonic()
            if blocks <= 0:
                return Pool(name, now - last, held, bool(self.targets - {name}) and self.repair.done())
            held = blocks
            # The other engine's time starts at the replacement of the dead one.
            since = max([last, *(self.replaced_at[target] for target in self.targets)])
            if self.repair.done() and now - since > self.connector.held_s:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        return Pool(name, None, held, silent=silent)


async def _settled(work: list[asyncio.Task[None]]) -> None:
    """Wait until all have ended; cancellations by the campaign are no errors."""
    for ending in await asyncio.gather(*work, return_exceptions=True):
        if ending is not None and not isinstance(ending, asyncio.CancelledError):
            raise ending


def _stays_stopped(fault: Fault) -> bool:
    return fault.family == "stop" and fault.resume_s is None


async def _nothing() -> dict[str, Any]:
    return {}


def _told(trial: Trial, outcome: Outcome) -> str:
    wrong = f"{trial.text!r} instead of {trial.question.expected!r}" if outcome is Outcome.WRONG else ""
    return f"{outcome}, {trial.question.prompt_tokens} tokens: {wrong or (trial.failure or '')[:160]}"


def _troubles(log: Path, since: int) -> list[str]:
    """Return the first lines of a log that report problems."""
    with log.open("rb") as stream:
        stream.seek(since)
        lines = stream.read().decode(errors="replace").splitlines()
    found = dict.fromkeys(line.strip()[-220:] for line in lines if _TROUBLE.search(line))
    return [f"{log.name}: {line}" for line in list(found)[:4]]
