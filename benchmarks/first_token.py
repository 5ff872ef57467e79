"""Time to the first and second token over a slow link, compared with other deployments.

The model and the hosts are those of ``benchmarks.link``. Prefill engines have the first cores,
decode engines the last one. Arms, in random order for each prompt length:

link    Tandem over the link; prefill samples the first token (``router.first_token: prefill``)
decode  the same engines; decode samples the first token (``router.first_token: decode``)
memory  Tandem over shared memory; prefill samples the first token
alone   one vLLM engine without a connector on the cores of prefill engines
nixl    NixlConnector over the link: the prefill leg, then the decode leg

Two METHODS: ``stopped`` runs one arm's processes at a time; the others are stopped (SIGSTOP).
``alive`` keeps all running but NixlConnector's, whose progress threads spin when idle. Both wait
1.5 s before each request, because vLLM's workers spin for a second after a step. The first token
comes from the sampling engine, the second from decode. The benchmark uses no router and no HTTP.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.engines import PLAIN, ROLES, Arm, random_prompt, start_arms, start_side
from benchmarks.link import ENGINE, SETTLES_S, bits_a_second, start
from benchmarks.report import ratios, spread, summary, turns, write
from testing.engines import generate
from testing.hosts import Switch, hosts
from testing.models import SizedModel, wide_llama
from testing.processes import Processes

ARMS = ("link", "decode", "memory", "alone", "nixl")
METHODS = ("stopped", "alive")
TOKENS = 2
PAUSE_S = 1.5
AIMS = (
    ("first", "link", "memory", 1.05),
    ("first", "link", "alone", 1.05),
    ("first", "link", "decode", None),
    ("second", "link", "decode", 1.02),
    ("first", "link", "nixl", None),
)
"""Ratios to report: token, arm, arm to compare with, and the largest ratio aimed at."""

Times = dict[tuple[str, int, str], list[list[float]]]
"""Milliseconds to each token of each request, by method, prompt tokens and arm."""


@dataclass
class Bench:
    """Engines of all arms.

    ``counts``  requests whose first token prefill sampled (``handed_over``), and those of them
                whose first token decode did not repeat (``other_first_tokens``)
    """

    pairs: dict[str, Arm]
    alone: AsyncLLM
    alone_processes: Processes
    counts: Counter[str] = field(default_factory=lambda: Counter(handed_over=0, other_first_tokens=0))

    def processes(self, arm: str) -> Processes:
        return self.alone_processes if arm == "alone" else self.pairs["link" if arm == "decode" else arm]

    async def token_at(self, arm: str, prompt: list[int]) -> tuple[float, ...]:
        """Send one request; return the monotonic time of each token."""
        if arm == "alone":
            return (await generate(self.alone, prompt, TOKENS, **PLAIN)).token_at
        if arm == "nixl":
            return (await self.pairs[arm].in_turn(prompt, TOKENS)).token_at
        pair = self.pairs["link" if arm == "decode" else arm]
        known = pair.pair.address
        address = {key: value for key, value in known.items() if key != "first_token_multiple"}
        if arm != "decode":
            address["prompt_multiple"] = known["first_token_multiple"]
        pair = replace(pair, pair=replace(pair.pair, address=address))
        if arm == "decode":
            return (await pair.together(prompt, TOKENS)).token_at
        decode = await pair.together(prompt, TOKENS, first_token=True)
        self.counts["handed_over"] += 1
        self.counts["other_first_tokens"] += decode.prefill.tokens[0] != decode.tokens[0]
        return min(decode.prefill.token_at[0], decode.token_at[0]), *decode.token_at[1:]


async def start_all(stack: ExitStack, model: str, link: Switch) -> Bench:
    """Start all engines, asleep; they end with the stack."""
    places = {"memory": ("tandem", None), "link": ("tandem", link), "nixl": ("pull", link)}
    alone, pids = start_side(model, None, **ENGINE)
    processes = Processes(sorted(pids))
    stack.callback(alone.shutdown)
    stack.callback(processes.wake)
    processes.sleep()

    pairs = await start_arms(stack, places, lambda name, role: start(places[name][0], role, model, places[name][1]))
    return Bench(pairs, alone, processes)


async def measure(
    model: SizedModel, link: Switch, requests: int, lengths: tuple[int, ...], methods: tuple[str, ...]
) -> tuple[Times, dict[str, int]]:
    dice, found = random.Random(0), defaultdict(list)
    with ExitStack() as stack:
        bench = await start_all(stack, model.path, link)
        for method in methods:
            alive = {arm for arm in ARMS if method == "alive" and arm != "nixl"}
            for arm in alive:
                bench.processes(arm).wake()
            for length, arm, counted in turns(ARMS, requests, lengths):
                prompt, processes = random_prompt(dice, length), bench.processes(arm)
                with ExitStack() as running:
                    if arm not in alive:
                        running.enter_context(processes.awake())
                    await asyncio.sleep(PAUSE_S)
                    started = time.monotonic()
                    token_at = await asyncio.wait_for(bench.token_at(arm, prompt), 120)
                    await asyncio.sleep(SETTLES_S)
                if counted:
                    found[method, length, arm].append([1e3 * (at - started) for at in token_at])
            for arm in alive:
                bench.processes(arm).sleep()
    return found, dict(bench.counts)


def main(
    *,
    requests: int = 4,
    rate: str = "80mbit",
    lengths: tuple[int, ...] = (250, 500, 1000, 2000),
    methods: tuple[str, ...] = METHODS,
) -> None:
    bits = bits_a_second(rate)
    if requests < 2:
        raise SystemExit(f"REQUESTS={requests}: quartiles need at least 2")
    if not set(methods) <= set(METHODS):
        raise SystemExit(f"METHODS={','.join(methods)}: write names of {', '.join(METHODS)}, separated by commas")
    with tempfile.TemporaryDirectory() as folder, hosts(ROLES, rate) as link:
        model = wide_llama(Path(folder) / "model")
        found, counts = asyncio.run(measure(model, link, requests, lengths, methods))
    rows = []
    print(f"method   tokens  link ms   token    ms of {', '.join(ARMS)}; ratios (quartiles)")
    for method, length in ((method, length) for method in methods for length in lengths):
        size_bytes = length * model.shape["token_bytes_a_layer"] * model.shape["full_layers"]
        row: dict[str, Any] = {"method": method, "prompt_tokens": length, "link_ms": 8e3 * size_bytes / bits}
        for index, token in enumerate(("first", "second")):
            times = {arm: [sample[index] for sample in found[method, length, arm]] for arm in ARMS}
            row[token] = {f"{arm}_ms": summary(times[arm]) for arm in ARMS}
            shown = []
            for _, arm, other, aim in (each for each in AIMS if each[0] == token):
                ratio = row[token][f"{arm}_over_{other}"] = ratios(times[arm], times[other])
                missed = f" MISSED {aim}" if aim is not None and ratio["of_medians"] > aim else ""
                shown.append(f"{arm}/{other} {spread(ratio)}{missed}")
            medians = " ".join(f"{row[token][f'{arm}_ms']['median']:.0f}" for arm in ARMS)
            print(f"{method:8} {length:6d} {row['link_ms']:8.0f}   {token:6s}   {medians}; {', '.join(shown)}")
        rows.append(row)
    print(f"decode repeated another first token {counts['other_first_tokens']} of {counts['handed_over']} times")
    write(f"first_token_{rate}", {"rate": rate, "requests": requests, "rows": rows, **counts})
