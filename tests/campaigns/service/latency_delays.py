"""Stop an engine for a while at a known moment: the latency breakdown must show that part."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass

import httpx

from testing.facts import make_prompt
from testing.service_process import ServiceProcess
from testing.timing import server_timing
from tests.campaigns.runner import Report
from tests.campaigns.service.world import MODEL, EngineProcess, engine_processes, service

LONG_FACTS, SHORT_FACTS = 230, 30


@dataclass(frozen=True)
class Delay:
    """Stop of a role's core, or of its worker, for ``stop_s``, from ``after_s`` after the request.

    vLLM's CPU engines have a worker process, which continues to receive KV while the core, the
    scheduler, is stopped.
    """

    part: str
    role: str
    after_s: float
    stop_s: float
    facts: int
    worker: bool = False


DELAYS = (
    Delay("prefill_queue", "Prefill", -0.05, 0.6, SHORT_FACTS),
    # Not in the last chunk: its worker would continue without the core.
    Delay("prefill", "Prefill", 0.1, 0.6, LONG_FACTS),
    Delay("decode_queue", "Decode", -0.05, 0.9, SHORT_FACTS),
    Delay("decode_queue", "Decode", 0.3, 1.5, LONG_FACTS),
    Delay("transfer", "Decode", 0.3, 1.5, LONG_FACTS, worker=True),
)


def latency_breakdown(report: Report, *, count: int = 7) -> None:
    """``count`` requests with and without each delay."""
    with service(report, router={"replicas": 2}) as running:
        engines = {role: engine_processes(running.processes(), role)[0] for role in ("Prefill", "Decode")}
        for seed in range(4):
            _ask(running, seed, LONG_FACTS)
        for number, delay in enumerate(DELAYS):
            plain, late = [], []
            for turn in range(count):
                seed = 1000 * number + 2 * turn + 10
                plain.append(_ask(running, seed, delay.facts))
                stopping = threading.Thread(target=_stop, args=(engines[delay.role], delay))
                stopping.start()
                time.sleep(max(-delay.after_s, 0))
                late.append(_ask(running, seed + 1, delay.facts))
                stopping.join()
            largest = sum(max(parts.keys() - {"total"}, key=parts.__getitem__) == delay.part for parts in late)
            off = max(abs(sum(parts.values()) - 2 * parts["total"]) for parts in (*plain, *late))
            medians = [statistics.median(parts.get(delay.part, 0.0) for parts in some) for some in (plain, late)]
            name = f"{delay.role}{' worker' if delay.worker else ''} stopped at {delay.after_s:g} s"
            report.row(
                delay=name, part=delay.part, stopped_ms=1000 * delay.stop_s, medians_ms=medians, largest_in=largest
            )
            report.check(largest > count / 2, f"{name}: {delay.part} is the largest part of {largest} of {count}")
            report.check(off < 1, f"{name}: the parts miss the total by {off:.3f} ms")


def _ask(running: ServiceProcess, seed: int, facts: int) -> dict[str, float]:
    prompt = make_prompt(random.Random(f"latency breakdown {seed}"), facts, distance_facts=facts - 1).text
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    explain = {"x-tandem-explain": "1"}
    reply = httpx.post(f"{running.url}/v1/completions", json=body, headers=explain, timeout=60)
    assert reply.status_code == 200, reply.text
    return server_timing(reply)


def _stop(engine: EngineProcess, delay: Delay) -> None:
    core, *workers = engine.computing
    time.sleep(max(delay.after_s, 0))
    for process in workers if delay.worker else [core]:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(delay.stop_s)
    for process in workers if delay.worker else [core]:
        os.kill(process.pid, signal.SIGCONT)
