"""TTFT over a slow link: Tandem's streaming, the same transfer as a whole, and vLLM's
NixlConnector.

    python -m benchmarks.link [--requests 8] [--rate 800mbit] [--lengths 250,500,1000,2000]
        [--arms tandem,whole,pull,push] [--streaming auto|chunk|layer] [--model wide|hybrid]  (root)

Two hosts on one machine: prefill engines run in a network namespace and decode engines outside it.
KV travels over TCP through a link with that rate; with an empty rate, over shared memory without
namespaces. The model has much KV and little computation, so that a prompt's prefill takes about as
long as its transfer; ``hybrid`` is that of ``benchmarks.handover``. Four arms, interleaved request
by request, with the other arms' processes stopped:

tandem  both legs at once; chunks are sent while the next ones are computed
whole   the same engines; decode requests KV after the end of prefill, as with public proxies
pull    NixlConnector, its legs one after the other, as its protocol requires
push    NixlPushConnector, both legs at once: decode has registered its blocks when prefill ends
        (its best case)

Prefill runs on the first cores and decode on the last one, as on separate hosts. TTFT is a
client's, without router or HTTP. ``prefill_ms`` is the prefill leg's time in the pull arm (whole,
without that),
``link_ms`` the time of the bytes at the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.handover import ideal_bytes, in_turn, tandem
from benchmarks.namespace import Namespace, namespace
from benchmarks.report import ratios, summary, write
from testing.engines import describe, start_engine
from testing.legs import Leg, leg
from testing.models import VOCABULARY, SizedModel, benchmark_gemma3, wide_llama
from testing.processes import Arm, children, environment, own_cores, pin
from testing.sequential_proxy import PRODUCE

ARMS = ("tandem", "whole", "pull", "push")
MODELS = {"wide": wide_llama, "hybrid": benchmark_gemma3}
CONNECTORS = {"tandem": "TandemConnector", "pull": "NixlConnector", "push": "NixlPushConnector"}
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "enable_prefix_caching": False}
DECODE_TOKENS = 2
NIXL_FIRST_PORT = 5700
SETTLES_S = 0.3
"""Pause after a request in which its blocks are freed, before its arm is stopped."""


def transfer_config(name: str, role: str, **settings: str) -> KVTransferConfig:
    ours: dict[str, Any] = {
        "kv_connector_module_path": "connectors.vllm_hma.connector",
        "kv_connector_extra_config": settings,
    }
    return KVTransferConfig(
        kv_connector=CONNECTORS[name],
        kv_role=role,
        kv_load_failure_policy="recompute",
        **(ours if name == "tandem" else {}),
    )


def start(
    name: str, role: str, model: str, prefill_host: Namespace | None, streaming: str = "auto"
) -> tuple[AsyncLLM, set[int]]:
    """An engine and its processes: prefill inside the namespace, decode outside it."""
    before, cores, inside = children(), own_cores(), role == "kv_producer"
    there = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_FIRST_PORT + 10 * list(CONNECTORS).index(name) + inside)}
    settings = {"streaming": streaming}
    if prefill_host is not None:
        address = prefill_host.address if inside else prefill_host.outside
        there |= {"UCX_TLS": "tcp,self", "VLLM_NIXL_SIDE_CHANNEL_HOST": address}
        settings["side_channel_host"] = address
    with environment(there), prefill_host.entered() if prefill_host and inside else contextlib.nullcontext():
        engine = start_engine(model, 1, None, kv_transfer_config=transfer_config(name, role, **settings), **ENGINE)
    pids = children() - before
    pin(pids, (cores[:-1] or cores) if inside else cores[-1:])
    return engine, pids


def start_arms(model: str, prefill_host: Namespace | None, names: Iterable[str], streaming: str) -> dict[str, Arm]:
    """A process that has entered the namespace keeps its /sys, where UCX looks for devices.

    So start the engines outside the namespace first.
    """
    engines = [name for name in CONNECTORS if name in names or (name == "tandem" and "whole" in names)]
    decodes = {name: start(name, "kv_consumer", model, prefill_host, streaming) for name in engines}
    arms = {}
    for name, (decode, pids) in decodes.items():
        prefill, others = start(name, "kv_producer", model, prefill_host, streaming)
        arms[name] = Arm(sorted(pids | others), name, prefill, decode)
    return arms


async def pushed(arm: Arm, address: dict[str, Any], prompt: list[int]) -> Leg:
    """Send both legs at once with one request id, by which this connector finds the blocks."""
    request_id = uuid.uuid4().hex
    prefill = asyncio.ensure_future(leg(arm.prefill, prompt, 1, PRODUCE, request_id))
    decode = await leg(arm.decode, prompt, DECODE_TOKENS, address | {"remote_request_id": request_id}, request_id)
    await prefill
    return decode


@dataclass
class Bench:
    arms: dict[str, Arm]
    addresses: dict[str, dict[str, Any]]

    def of(self, name: str) -> Arm:
        return self.arms["tandem" if name == "whole" else name]

    async def learn_addresses(self) -> None:
        """Return the address of each prefill engine, from its own answer."""
        for name, arm in self.arms.items():
            with arm.awake():
                if name == "tandem":
                    self.addresses[name] = await describe(arm.prefill)
                else:
                    prefill, _ = await asyncio.wait_for(in_turn_or_first(arm, name), 60)
                    assert prefill.output.kv_transfer_params is not None
                    self.addresses[name] = dict(prefill.output.kv_transfer_params)

    async def ask(self, name: str, prompt: list[int]) -> tuple[float, float]:
        """Return (TTFT, prefill leg or 0) in ms."""
        arm = self.of(name)
        with arm.awake():
            started, prefilled = time.monotonic(), 0.0
            if name == "tandem":
                _, decode = await tandem(arm, self.addresses[name], prompt, DECODE_TOKENS)
            elif name == "push":
                decode = await pushed(arm, self.addresses[name], prompt)
            else:
                first, decode = await in_turn(arm, prompt, DECODE_TOKENS)
                prefilled = first.first_token_at - started
            await asyncio.sleep(SETTLES_S)
        return 1e3 * (decode.first_token_at - started), 1e3 * prefilled


async def in_turn_or_first(arm: Arm, name: str) -> tuple[Leg, Leg]:
    """Send one request, which connects the engines; push matches its legs by their id."""
    prompt, request_id = [3] * 40, uuid.uuid4().hex
    prefill = await leg(arm.prefill, prompt, 1, PRODUCE, request_id)
    transfer = prefill.output.kv_transfer_params
    assert transfer is not None
    return prefill, await leg(arm.decode, prompt, 1, dict(transfer), request_id if name == "push" else None)


async def measure(
    model: SizedModel, prefill_host: Namespace | None, lengths: list[int], arms: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    bench = Bench(start_arms(model.path, prefill_host, arms, options.streaming), {})
    in_turn_arm = "pull" if "pull" in arms else "whole"
    rng = random.Random(0)
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    prefills: dict[int, list[float]] = defaultdict(list)
    try:
        for arm in bench.arms.values():
            arm.sleep()
        await bench.learn_addresses()
        for number in range(-1, options.requests):
            for tokens in lengths:
                for name in rng.sample(arms, len(arms)):
                    prompt = [rng.randrange(3, VOCABULARY) for _ in range(tokens)]
                    ttft_ms, prefill_ms = await asyncio.wait_for(bench.ask(name, prompt), 120)
                    if number >= 0:  # the first round is a warm-up
                        found[tokens, name].append(ttft_ms)
                        if name == in_turn_arm:
                            prefills[tokens].append(prefill_ms)
    finally:
        for arm in bench.arms.values():
            arm.shutdown()
    rows = []
    for tokens in lengths:
        size_bytes = ideal_bytes(model.shape, tokens)
        row: dict[str, Any] = {
            "prompt_tokens": tokens,
            "kv_bytes": size_bytes,
            "link_ms": 8e3 * size_bytes / bits_a_second(options.rate) if options.rate else 0.0,
            "prefill_ms": summary(prefills[tokens]),
        }
        for name in arms:
            row[name] = {"ttft_ms": summary(found[tokens, name])}
            if name != "tandem":
                row[name]["tandem_over_this"] = ratios(found[tokens, "tandem"], found[tokens, name])
        rows.append(row)
    return {"rate": options.rate, "streaming": options.streaming, "requests": options.requests, "rows": rows}


def bits_a_second(rate: str) -> float:
    """Parse ``800mbit``, in tc's notation. Raises ValueError for other notations."""
    match = re.fullmatch(r"(\d+)(k|m|g)bit", rate)
    if match is None:
        raise ValueError(f"--rate {rate!r}: write a number and kbit, mbit or gbit, as for tc")
    return int(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def show(rows: list[dict[str, Any]], arms: list[str]) -> None:
    titles = "".join(f"{name:>7}" for name in arms)
    print(f"tokens    MB  prefill ms  link ms   TTFT ms: {titles}   tandem over {', '.join(arms[1:])}")
    for row in rows:
        medians = "".join(f"{row[name]['ttft_ms']['median']:7.0f}" for name in arms)
        over = (row[name]["tandem_over_this"] for name in arms if name != "tandem")
        shown = ", ".join(f"{r['of_medians']:.2f} ({r['q1']:.2f}-{r['q3']:.2f})" for r in over)
        print(
            f"{row['prompt_tokens']:6d} {row['kv_bytes'] / 1e6:5.1f} {row['prefill_ms']['median']:11.0f}"
            f" {row['link_ms']:8.0f}            {medians}   {shown}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rate", default="800mbit", help="of the link between namespaces; empty: shared memory")
    parser.add_argument("--lengths", default="250,500,1000,2000")
    parser.add_argument("--arms", default=",".join(ARMS), help="tandem, and those to compare it with")
    parser.add_argument("--streaming", default="auto")
    parser.add_argument("--model", choices=list(MODELS), default="wide")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    arms = options.arms.split(",")
    if arms[0] != "tandem" or not set(arms) <= set(ARMS) or not {"whole", "pull"} & set(arms):
        parser.error(f"--arms {options.arms}: write tandem, then whole or pull, and others of {', '.join(ARMS)}")
    if options.rate:
        bits_a_second(options.rate)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        prefill_host = stack.enter_context(namespace(options.rate)) if options.rate else None
        model = MODELS[options.model](Path(folder) / "model")
        document = asyncio.run(measure(model, prefill_host, lengths, arms, options))
    show(document["rows"], arms)
    print("\nwritten:", write("link" if options.streaming == "auto" else f"link_{options.streaming}", document))


if __name__ == "__main__":
    main()
