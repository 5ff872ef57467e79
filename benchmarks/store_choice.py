"""TTFT of prompts with a stored prefix over links and disks of several rates, by decision.

    python -m benchmarks.store_choice [--rounds 6] [--links 200mbit,800mbit,4gbit]
        [--disks 1000,120,40]  (root)

Prefill engines run in a network namespace, decode engines outside of it (``benchmarks.link``). Each
engine has a store of its own with the first 768 of a prompt's 968 tokens, on a disk whose reads are
limited to a rate in MB/s (``benchmarks.slow_disk``). Two pairs: in one the store decides, in the
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

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.link import SETTLES_S, bits_a_second
from benchmarks.namespace import Namespace, namespace
from benchmarks.report import summary, write
from benchmarks.slow_disk import RATE_VARIABLE
from testing.engines import describe, start_engine
from testing.models import VOCABULARY, wide_llama
from testing.processes import Arm, children, environment, own_cores, pin

CHUNK, STORED_TOKENS, NEW_TOKENS, PROMPTS = 256, 768, 200, 2
WARM_UP = 8
REQUEST_S = 120.0
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


async def first_token_s(engine: AsyncLLM, mode: str, prompt: list[int], transfer: dict[str, Any] | None) -> float:
    """Return the time of the first token, on ``time.monotonic``."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )
    at = 0.0
    async for _ in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, f"{mode}-{uuid.uuid4().hex}"):
        at = at or time.monotonic()
    return at


class Pair:
    """An arm, and the address of its prefill engine."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self.address: dict[str, Any] = {}

    async def ttft_ms(self, modes: tuple[str, str] | str, prompt: list[int]) -> float:
        """Send a prompt. The arm must be awake."""
        began = time.monotonic()
        if isinstance(modes, str):
            ended = await first_token_s(self.arm.decode, modes, prompt, None)
        else:
            transfer_id = uuid.uuid4().hex
            produce = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
            consume = self.address | {"transfer_id": transfer_id}
            _, ended = await asyncio.gather(
                first_token_s(self.arm.prefill, modes[0], prompt, produce),
                first_token_s(self.arm.decode, modes[1], prompt, consume),
            )
        await asyncio.sleep(SETTLES_S)
        return 1e3 * (ended - began)


def start_side(role: str, model: str, place: Namespace, folder: Path) -> tuple[AsyncLLM, set[int]]:
    """Start an engine, prefill inside the namespace; return it and its processes."""
    before, cores, inside = children(), own_cores(), role == "kv_producer"
    address = place.address if inside else place.outside
    store = {"path": str(folder / role), "disk_gib": 4.0, "chunk_tokens": CHUNK, "lookup_s": 0.2, "load_s": 30.0}
    transfer = KVTransferConfig(
        kv_connector="SlowDiskConnector",
        kv_connector_module_path="benchmarks.slow_disk",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"side_channel_host": address, "store": store},
    )
    with environment({"UCX_TLS": "tcp,self"}), place.entered() if inside else contextlib.nullcontext():
        engine = start_engine(
            model, 1, None, kv_transfer_config=transfer, max_num_batched_tokens=CHUNK, num_gpu_blocks_override=256
        )
    pids = children() - before
    pin(pids, (cores[:-1] or cores) if inside else cores[-1:])
    return engine, pids


@contextlib.contextmanager
def running_pairs(model: str, place: Namespace, folder: Path) -> Iterator[dict[str, Pair]]:
    """Start the two pairs; engines outside the namespace first (``benchmarks.link``)."""
    engines: list[AsyncLLM] = []
    pairs: dict[str, Pair] = {}
    try:
        sides = {}
        for role in ("kv_consumer", "kv_producer"):
            for name in ("auto", "fixed"):
                sides[name, role] = start_side(role, model, place, folder / name)
                engines.append(sides[name, role][0])
        for name in ("auto", "fixed"):
            (prefill, inside), (decode, outside) = sides[name, "kv_producer"], sides[name, "kv_consumer"]
            pairs[name] = Pair(Arm(sorted(inside | outside), name, prefill, decode))
        yield pairs
    finally:
        for pair in pairs.values():
            pair.arm.wake()
        for engine in engines:
            engine.shutdown()


class Bench:
    """Both pairs, and a file with the disks' rate."""

    def __init__(self, pairs: dict[str, Pair], rate: Path) -> None:
        self._pairs = pairs
        self._rate = rate
        self._dice = random.Random(0)
        self._prefixes = [[self._dice.randrange(4, VOCABULARY) for _ in range(STORED_TOKENS)] for _ in range(PROMPTS)]

    async def fill(self) -> None:
        """Learn the addresses, and store the prefixes on all engines."""
        for pair in self._pairs.values():
            pair.arm.sleep()
        for pair in self._pairs.values():
            with pair.arm.awake():
                pair.address = await describe(pair.arm.prefill)
                for prefix in self._prefixes:
                    await asyncio.wait_for(pair.ttft_ms("auto", [*prefix, 3]), REQUEST_S)
                    await asyncio.wait_for(pair.ttft_ms(("auto", "auto"), [*prefix, 3]), REQUEST_S)
                await asyncio.sleep(3.0)

    async def ask(self, decision: str, modes: tuple[str, str] | str) -> float:
        prompt = self._dice.choice(self._prefixes) + [self._dice.randrange(4, VOCABULARY) for _ in range(NEW_TOKENS)]
        pair = self._pairs["auto" if decision in AUTOMATIC else "fixed"]
        with pair.arm.awake():
            return await asyncio.wait_for(pair.ttft_ms(modes, prompt), REQUEST_S)

    async def cell(self, disk_mb_s: float, rounds: int) -> dict[str, Any]:
        """Measure all decisions with one disk rate."""
        self._rate.write_text(str(disk_mb_s * 1e6))
        decisions = {decision: modes for kind in KINDS.values() for decision, modes in kind.items()}
        for _ in range(WARM_UP):
            for decision in AUTOMATIC:
                await self.ask(decision, decisions[decision])
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            for decision in self._dice.sample(sorted(decisions), len(decisions)):
                found[decision].append(await self.ask(decision, decisions[decision]))
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


async def measure(link: str, model: str, folder: Path, disks: list[float], rounds: int) -> list[dict[str, Any]]:
    """Measure one link."""
    rows = []
    rate = folder / f"rate-{link}"
    rate.write_text(FAST_DISK)
    with (
        environment({RATE_VARIABLE: str(rate)}),
        namespace(link) as place,
        running_pairs(model, place, folder / link) as pairs,
    ):
        bench = Bench(pairs, rate)
        await bench.fill()
        for disk in disks:
            rows.append({"link": link, **await bench.cell(disk, rounds)})
            show(rows[-1])
    return rows


def measure_link(link: str, model: str, folder: Path, disks: list[float], rounds: int) -> list[dict[str, Any]]:
    """Measure one link in a process of its own, which can enter only one namespace.

    Its /sys stays that of the namespace (``Namespace.entered``).
    """
    return asyncio.run(measure(link, model, folder, disks, rounds))


def show(row: dict[str, Any]) -> None:
    for kind in KINDS:
        medians = ", ".join(f"{name} {times['median']:.0f}" for name, times in row[kind]["ttft_ms"].items())
        spread = row[kind]["paired_regret"]
        print(
            f"link {row['link']}, disk {row['disk_mb_s']:g} MB/s: {medians} ms; best {row[kind]['best']}, "
            f"regret {row[kind]['regret']:.2f} ({spread['q1']:.2f} to {spread['q3']:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--links", default="200mbit,800mbit,4gbit")
    parser.add_argument("--disks", default="1000,120,40", help="rates of the disks in MB/s, from fast to slow")
    arguments = parser.parse_args()
    links = arguments.links.split(",")
    for link in links:
        bits_a_second(link)
    disks = [float(disk) for disk in arguments.disks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = wide_llama(Path(folder) / "model")
        token_bytes = model.shape["token_bytes_a_layer"] * model.shape["full_layers"]
        document = {"rounds": arguments.rounds, "stored_bytes": STORED_TOKENS * token_bytes, "rows": []}
        for link in links:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                task = process.submit(measure_link, link, model.path, Path(folder), disks, arguments.rounds)
                document["rows"] += task.result()
    regrets = [row[kind]["regret"] for row in document["rows"] for kind in KINDS]
    document["mean_regret"], document["largest_regret"] = sum(regrets) / len(regrets), max(regrets)
    print(f"regret: mean {document['mean_regret']:.3f}, largest {document['largest_regret']:.3f}")
    print("\nwritten:", write("store_choice", document))


if __name__ == "__main__":
    main()
