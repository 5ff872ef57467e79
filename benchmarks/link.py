"""TTFT over a slow link: Tandem's streaming, the same transfer as a whole, and vLLM's
NixlConnector.

    python -m benchmarks.link [--requests 8] [--rate 800mbit] [--lengths 250,500,1000,2000]  (root)

Two hosts on one machine: prefill engines run in a network namespace and decode engines outside it.
KV travels over TCP through a link with that rate. The model has much KV and little computation, so
that a prompt's prefill takes about as long as its transfer. Four arms, interleaved request by
request, with the other arms' processes stopped:

tandem  both legs at once; chunks are sent while the next ones are computed
whole   the same engines; decode requests KV after the end of prefill, as with public proxies
pull    NixlConnector, its legs one after the other, as its protocol requires
push    NixlPushConnector, both legs at once: decode has registered its blocks when prefill ends
        (its best case)

Prefill runs on the first cores and decode on the last one, as on separate hosts. TTFT is a
client's, without router or HTTP. ``prefill_ms`` is the prefill leg's time in the pull arm,
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.namespace import Namespace, namespace
from benchmarks.report import ratios, summary, write
from testing.engines import describe, start_engine
from testing.legs import Leg, leg
from testing.models import VOCABULARY, SizedModel, wide_llama
from testing.processes import Arm, children, environment, own_cores, pin
from testing.sequential_proxy import PRODUCE

ARMS = ("tandem", "whole", "pull", "push")
CONNECTORS = {"tandem": "TandemConnector", "pull": "NixlConnector", "push": "NixlPushConnector"}
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "enable_prefix_caching": False}
DECODE_TOKENS = 2
NIXL_FIRST_PORT = 5700
SETTLES_S = 0.3
"""Pause after a request in which its blocks are freed, before its arm is stopped."""


def transfer_config(name: str, role: str, address: str) -> KVTransferConfig:
    ours: dict[str, Any] = {
        "kv_connector_module_path": "connectors.vllm_hma.connector",
        "kv_connector_extra_config": {"side_channel_host": address},
    }
    return KVTransferConfig(
        kv_connector=CONNECTORS[name],
        kv_role=role,
        kv_load_failure_policy="recompute",
        **(ours if name == "tandem" else {}),
    )


def start(name: str, role: str, model: str, prefill_host: Namespace) -> tuple[AsyncLLM, set[int]]:
    """An engine and its processes: prefill inside the namespace, decode outside it."""
    before, cores, inside = children(), own_cores(), role == "kv_producer"
    address = prefill_host.address if inside else prefill_host.outside
    there = {
        "UCX_TLS": "tcp,self",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_FIRST_PORT + 10 * list(CONNECTORS).index(name) + inside),
    }
    with environment(there), prefill_host.entered() if inside else contextlib.nullcontext():
        engine = start_engine(model, 1, None, kv_transfer_config=transfer_config(name, role, address), **ENGINE)
    pids = children() - before
    pin(pids, (cores[:-1] or cores) if inside else cores[-1:])
    return engine, pids


def start_arms(model: str, prefill_host: Namespace) -> dict[str, Arm]:
    """A process that has entered the namespace keeps its /sys, where UCX looks for devices.

    So start the engines outside the namespace first.
    """
    decodes = {name: start(name, "kv_consumer", model, prefill_host) for name in CONNECTORS}
    arms = {}
    for name, (decode, pids) in decodes.items():
        prefill, others = start(name, "kv_producer", model, prefill_host)
        arms[name] = Arm(sorted(pids | others), name, prefill, decode)
    return arms


async def together(arm: Arm, address: dict[str, Any], prompt: list[int]) -> Leg:
    """Send both legs at once."""
    transfer_id = uuid.uuid4().hex
    produce = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    prefill = asyncio.ensure_future(leg(arm.prefill, prompt, 1, produce))
    decode = await leg(arm.decode, prompt, DECODE_TOKENS, address | {"transfer_id": transfer_id})
    await prefill
    return decode


async def in_turn(arm: Arm, prompt: list[int]) -> tuple[Leg, Leg]:
    prefill = await leg(arm.prefill, prompt, 1, PRODUCE)
    assert prefill.output.kv_transfer_params is not None
    return prefill, await leg(arm.decode, prompt, DECODE_TOKENS, prefill.output.kv_transfer_params)


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
                decode = await together(arm, self.addresses[name], prompt)
            elif name == "push":
                decode = await pushed(arm, self.addresses[name], prompt)
            else:
                first, decode = await in_turn(arm, prompt)
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
    model: SizedModel, prefill_host: Namespace, requests: int, lengths: list[int], rate: str
) -> dict[str, Any]:
    bench = Bench(start_arms(model.path, prefill_host), {})
    rng = random.Random(0)
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    prefills: dict[int, list[float]] = defaultdict(list)
    try:
        for arm in bench.arms.values():
            arm.sleep()
        await bench.learn_addresses()
        for number in range(-1, requests):
            for tokens in lengths:
                for name in rng.sample(ARMS, len(ARMS)):
                    prompt = [rng.randrange(3, VOCABULARY) for _ in range(tokens)]
                    ttft_ms, prefill_ms = await asyncio.wait_for(bench.ask(name, prompt), 120)
                    if number >= 0:  # the first round is a warm-up
                        found[tokens, name].append(ttft_ms)
                        if name == "pull":
                            prefills[tokens].append(prefill_ms)
    finally:
        for arm in bench.arms.values():
            arm.shutdown()
    rows = []
    for tokens in lengths:
        size_bytes = tokens * model.shape["token_bytes_a_layer"] * model.shape["full_layers"]
        row: dict[str, Any] = {
            "prompt_tokens": tokens,
            "kv_bytes": size_bytes,
            "link_ms": 8e3 * size_bytes / bits_a_second(rate),
            "prefill_ms": summary(prefills[tokens]),
        }
        for name in ARMS:
            row[name] = {"ttft_ms": summary(found[tokens, name])}
            if name != "tandem":
                row[name]["tandem_over_this"] = ratios(found[tokens, "tandem"], found[tokens, name])
        rows.append(row)
    return {"rate": rate, "requests": requests, "rows": rows}


def bits_a_second(rate: str) -> float:
    """Parse ``800mbit``, in tc's notation. Raises ValueError for other notations."""
    match = re.fullmatch(r"(\d+)(k|m|g)bit", rate)
    if match is None:
        raise ValueError(f"--rate {rate!r}: write a number and kbit, mbit or gbit, as for tc")
    return int(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def show(rows: list[dict[str, Any]]) -> None:
    print("tokens    MB  prefill ms  link ms   TTFT ms: tandem  whole   pull   push   tandem over whole, pull, push")
    for row in rows:
        medians = "".join(f"{row[name]['ttft_ms']['median']:7.0f}" for name in ARMS)
        over = (row[name]["tandem_over_this"] for name in ARMS if name != "tandem")
        shown = ", ".join(f"{r['of_medians']:.2f} ({r['q1']:.2f}-{r['q3']:.2f})" for r in over)
        print(
            f"{row['prompt_tokens']:6d} {row['kv_bytes'] / 1e6:5.1f} {row['prefill_ms']['median']:11.0f}"
            f" {row['link_ms']:8.0f}          {medians}   {shown}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--lengths", default="250,500,1000,2000")
    arguments = parser.parse_args()
    bits_a_second(arguments.rate)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder, namespace(arguments.rate) as prefill_host:
        model = wide_llama(Path(folder) / "model")
        document = asyncio.run(measure(model, prefill_host, arguments.requests, lengths, arguments.rate))
    show(document["rows"])
    print("\nwritten:", write("link", document))


if __name__ == "__main__":
    main()
