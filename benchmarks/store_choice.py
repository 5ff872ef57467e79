"""TTFT of prompts with a stored prefix over links and disks of several rates, by decision.

Prefill and decode engines run on two hosts (``benchmarks.link``). Each engine has a store of its
own with the first 768 of a prompt's 968 tokens, on a disk whose reads are limited to a rate in MB/s
(``benchmarks.slow_disk``; DISKS from fast to slow). Two pairs: in one the store decides, in the
other each request has a fixed decision. Requests are interleaved, with the other pair's processes
stopped:

    transfer          prefill computes the prompt and sends its KV
    prefill loads     prefill loads the prefix, computes the rest and sends all KV
    decode loads      prefill computes the prompt; decode loads the prefix, prefill sends the rest
    both load         prefill and decode load the prefix, prefill sends the rest
    auto              prefill and decode decide
    local             decode computes the prompt, without a transfer
    local loads       decode loads the prefix and computes the rest
    auto local        decode decides

Regret compares the median of an automatic decision with the lowest median of the fixed ones, of
those with a transfer and of those without one. The router chooses between these two kinds. Engines
are new for each link; the pair that decides has seen 8 requests of each kind at the present rates
before it is measured. TTFT is a client's, without router and HTTP.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
import uuid
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines import PLAIN, ROLES, Arm, Side, random_prompt, start_arms, start_side
from benchmarks.link import SETTLES_S, bits_a_second
from benchmarks.report import spread, summary, turns, write
from benchmarks.slow_disk import RATE_VARIABLE
from testing.engines import generate
from testing.hosts import Switch, hosts
from testing.models import wide_llama
from testing.processes import environment

CHUNK, STORED_TOKENS, NEW_TOKENS, PROMPTS = 256, 768, 200, 2
WARM_UP = 8
FAST_DISK = "1e12"
KINDS: dict[str, dict[str, tuple[str, str] | str]] = {
    # Mode of the prefill and the decode leg, or of a request without a transfer.
    "transfer": {
        "transfer": ("plain", "plain"),
        "prefill loads": ("always", "plain"),
        "decode loads": ("plain", "always"),
        "both load": ("always", "always"),
        "auto": ("auto", "auto"),
    },
    "local": {"local": "plain", "local loads": "always", "auto local": "auto"},
}
AUTOMATIC = ("auto", "auto local")


DECISIONS = {decision: modes for kind in KINDS.values() for decision, modes in kind.items()}


def start_store_side(role: str, model: str, link: Switch, folder: Path) -> Side:
    store = {"path": str(folder / role), "disk_gib": 4.0, "chunk_tokens": CHUNK, "lookup_s": 0.2, "load_s": 30.0}
    transfer = {"side_channel_host": link.hosts[role].address, "store": store}
    engine: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "num_gpu_blocks_override": 256}
    return start_side(model, role, link, connector="SlowDiskConnector", transfer=transfer, **engine)


class Bench:
    """Both pairs, and a file with the disks' rate."""

    def __init__(self, pairs: dict[str, Arm], rate: Path) -> None:
        self._pairs, self._rate = pairs, rate
        self._dice = random.Random(0)
        self._prefixes = [random_prompt(self._dice, STORED_TOKENS) for _ in range(PROMPTS)]

    async def fill(self) -> None:
        for name, pair in self._pairs.items():
            with pair.awake():
                for prefix in self._prefixes:
                    for decision in ("auto local", "auto"):
                        await self._ttft_ms(name, decision, [*prefix, 3])
                await asyncio.sleep(3.0)

    async def ask(self, decision: str) -> float:
        """Return the milliseconds to the first token of a new prompt with a stored prefix."""
        name = "auto" if decision in AUTOMATIC else "fixed"
        prompt = self._dice.choice(self._prefixes) + random_prompt(self._dice, NEW_TOKENS)
        with self._pairs[name].awake():
            return await self._ttft_ms(name, decision, prompt)

    async def _ttft_ms(self, name: str, decision: str, prompt: list[int]) -> float:
        modes, pair = DECISIONS[decision], self._pairs[name]
        began = time.monotonic()
        if isinstance(modes, str):
            answer = await generate(pair.pair.decode, prompt, 1, request_id=f"{modes}-{uuid.uuid4().hex}", **PLAIN)
        else:
            answer = await pair.together(prompt, 1, modes)
        await asyncio.sleep(SETTLES_S)
        return 1e3 * (answer.token_at[0] - began)

    async def cell(self, disk_mb_s: float, rounds: int) -> dict[str, Any]:
        """Measure all decisions with one disk rate."""
        self._rate.write_text(str(disk_mb_s * 1e6))
        for _ in range(WARM_UP):
            for decision in AUTOMATIC:
                await self.ask(decision)
        found: dict[str, list[float]] = defaultdict(list)
        for _, decision, _ in turns(list(DECISIONS), rounds, warm_up=0):
            found[decision].append(await self.ask(decision))
        row: dict[str, Any] = {"disk_mb_s": disk_mb_s}
        for kind, of_kind in KINDS.items():
            times = {decision: summary(found[decision]) for decision in of_kind}
            automatic = next(decision for decision in of_kind if decision in AUTOMATIC)
            best = min((decision for decision in of_kind if decision != automatic), key=lambda d: times[d]["median"])
            paired = [a / b - 1 for a, b in zip(found[automatic], found[best], strict=True)]
            row[kind] = {
                "ttft_ms": times,
                "best": best,
                "regret": times[automatic]["median"] / times[best]["median"] - 1,
                "paired_regret": summary(paired),
            }
        return row


async def measure(rate: str, model: str, folder: Path, disks: tuple[float, ...], rounds: int) -> list[dict[str, Any]]:
    rows = []
    disk_rate = folder / f"rate-{rate}"
    disk_rate.write_text(FAST_DISK)
    with environment({RATE_VARIABLE: str(disk_rate)}), hosts(ROLES, rate) as link, ExitStack() as stack:

        def start(name: str, role: str) -> Side:
            return start_store_side(role, model, link, folder / rate / name)

        bench = Bench(await start_arms(stack, ("auto", "fixed"), start), disk_rate)
        await bench.fill()
        for disk in disks:
            rows.append({"link": rate, **await bench.cell(disk, rounds)})
            show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    for kind in KINDS:
        medians = ", ".join(f"{name} {times['median']:.0f}" for name, times in row[kind]["ttft_ms"].items())
        print(
            f"link {row['link']}, disk {row['disk_mb_s']:g} MB/s: {medians} ms; best {row[kind]['best']}, "
            f"regret {row[kind]['regret']:.2f}; paired {spread(row[kind]['paired_regret'])}",
            flush=True,
        )


def main(
    *,
    rounds: int = 6,
    links: tuple[str, ...] = ("200mbit", "800mbit", "4gbit"),
    disks: tuple[float, ...] = (1000.0, 120.0, 40.0),
) -> None:
    for link in links:
        bits_a_second(link)
    with tempfile.TemporaryDirectory() as folder:
        model = wide_llama(Path(folder) / "model")
        token_bytes = model.shape["token_bytes_a_layer"] * model.shape["full_layers"]
        document: dict[str, Any] = {"rounds": rounds, "stored_bytes": STORED_TOKENS * token_bytes, "rows": []}
        for link in links:
            document["rows"] += asyncio.run(measure(link, model.path, Path(folder), disks, rounds))
    regrets = [row[kind]["regret"] for row in document["rows"] for kind in KINDS]
    document["mean_regret"], document["largest_regret"] = sum(regrets) / len(regrets), max(regrets)
    print(f"regret: mean {document['mean_regret']:.3f}, largest {document['largest_regret']:.3f}")
    write("store_choice", document)
