"""TTFT over a slow link: Tandem's streaming, the same transfer as a whole, and vLLM's
NixlConnector.

Two hosts on one machine: prefill engines run in a network namespace and decode engines outside it.
KV travels over TCP through a link with RATE; with an empty rate, over shared memory without
namespaces. The model has much KV and little computation, so that a prompt's prefill takes about as
long as its transfer; ``MODEL=hybrid`` is that of ``benchmarks.handover``. Four arms, interleaved
request by request, with the other arms' processes stopped:

tandem  both legs at once; chunks are sent while the next ones are computed
whole   the same engines; decode requests KV after the end of prefill, as with public proxies
pull    NixlConnector, its legs one after the other, as its protocol requires
push    NixlPushConnector, both legs at once: decode has registered its blocks when prefill ends
        (its best case)

Prefill runs on the first cores and decode on the last one, as on separate hosts. TTFT is a
client's, without router or HTTP. ``prefill_ms`` is the prefill leg's time in the pull arm (whole,
without that), ``link_ms`` the time of the bytes at the rate.
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

from benchmarks.engines import ROLES, Side, in_turn, random_prompt, start_arms, start_side, together, transfer_config
from benchmarks.handover import ideal_bytes
from benchmarks.namespace import Namespace, bits_a_second, namespace
from benchmarks.report import ratios, spread, summary, turns, write
from testing.engines import describe
from testing.legs import Leg, leg
from testing.models import SizedModel, benchmark_gemma3, wide_llama
from testing.processes import Arm
from testing.sequential_proxy import PRODUCE

ARMS = ("tandem", "whole", "pull", "push")
MODELS = {"wide": wide_llama, "hybrid": benchmark_gemma3}
CONNECTORS = {"tandem": "TandemConnector", "pull": "NixlConnector", "push": "NixlPushConnector"}
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "enable_prefix_caching": False}
DECODE_TOKENS = 2
NIXL_FIRST_PORT = 5700
SETTLES_S = 0.3
"""Pause after a request in which its blocks are freed, before its arm is stopped."""


def start(connector: str, role: str, model: str, prefill_host: Namespace | None, streaming: str = "auto") -> Side:
    number = 10 * list(CONNECTORS).index(connector) + 1 - ROLES.index(role)
    variables = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_FIRST_PORT + number)}
    settings = {"streaming": streaming}
    if prefill_host is not None:
        settings["side_channel_host"] = prefill_host.address_of(role)
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = prefill_host.address_of(role)
    transfer = transfer_config(role, CONNECTORS[connector], **(settings if connector == "tandem" else {}))
    return start_side(model, transfer, prefill_host, variables, **ENGINE)


async def address_of(arm: Arm) -> dict[str, Any]:
    """Return the address of a prefill engine, from its own answer."""
    with arm.awake():
        if arm.name == "tandem":
            return await describe(arm.prefill)
        # This request also connects the engines; push matches its legs by their id.
        prefill, _ = await in_turn(arm, [3] * 40, 1, uuid.uuid4().hex if arm.name == "push" else None)
        return dict(prefill.output.kv_transfer_params or {})


async def pushed(arm: Arm, address: dict[str, Any], prompt: list[int]) -> tuple[Leg, Leg]:
    """Send both legs at once with one request id, by which this connector finds the blocks."""
    request_id = uuid.uuid4().hex
    consume = address | {"remote_request_id": request_id}
    return await asyncio.gather(
        leg(arm.prefill, prompt, 1, PRODUCE, request_id), leg(arm.decode, prompt, DECODE_TOKENS, consume, request_id)
    )


async def measure(
    model: SizedModel,
    prefill_host: Namespace | None,
    lengths: tuple[int, ...],
    names: tuple[str, ...],
    requests: int,
    streaming: str,
) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """Return (TTFT, prefill leg) in ms of each request, by prompt tokens and arm."""
    dice = random.Random(0)
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    engines = [name for name in CONNECTORS if name in names]
    with ExitStack() as stack:
        arms = start_arms(stack, engines, lambda name, role: start(name, role, model.path, prefill_host, streaming))
        addresses = {name: await address_of(arm) for name, arm in arms.items()}
        for tokens, name, counted in turns(names, requests, lengths):
            arm, prompt = arms["tandem" if name == "whole" else name], random_prompt(dice, tokens)
            with arm.awake():
                started = time.monotonic()
                if name == "tandem":
                    sent = together(arm, addresses[name], prompt, DECODE_TOKENS)
                elif name == "push":
                    sent = pushed(arm, addresses[name], prompt)
                else:
                    sent = in_turn(arm, prompt, DECODE_TOKENS)
                prefill, decode = await asyncio.wait_for(sent, 120)
                await asyncio.sleep(SETTLES_S)
            if counted:
                times = decode.first_token_at - started, prefill.first_token_at - started
                found[tokens, name].append((1e3 * times[0], 1e3 * times[1]))
    return found


def main(
    *,
    requests: int = 8,
    rate: str = "800mbit",
    lengths: tuple[int, ...] = (250, 500, 1000, 2000),
    arms: tuple[str, ...] = ARMS,
    streaming: str = "auto",
    model: str = "wide",
) -> None:
    if arms[0] != "tandem" or not set(arms) <= set(ARMS) or not {"whole", "pull"} & set(arms):
        raise SystemExit(f"ARMS={','.join(arms)}: write tandem, then whole or pull, and others of {', '.join(ARMS)}")
    bits = bits_a_second(rate) if rate else float("inf")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        prefill_host = stack.enter_context(namespace(rate)) if rate else None
        made = MODELS[model](Path(folder) / "model")
        found = asyncio.run(measure(made, prefill_host, lengths, arms, requests, streaming))
    print(f"tokens    MB  prefill ms  link ms   TTFT ms of {', '.join(arms)}; of tandem over {', '.join(arms[1:])}")
    rows = []
    for tokens in lengths:
        size_bytes = ideal_bytes(made.shape, tokens)
        prefills = [prefill for _, prefill in found[tokens, "pull" if "pull" in arms else "whole"]]
        row: dict[str, Any] = {"prompt_tokens": tokens, "kv_bytes": size_bytes}
        row |= {"link_ms": 8e3 * size_bytes / bits, "prefill_ms": summary(prefills)}
        times = {name: [ttft for ttft, _ in found[tokens, name]] for name in arms}
        for name in arms:
            row[name] = {"ttft_ms": summary(times[name])}
            if name != "tandem":
                row[name]["tandem_over_this"] = ratios(times["tandem"], times[name])
        rows.append(row)
        medians = " ".join(f"{row[name]['ttft_ms']['median']:.0f}" for name in arms)
        over = ", ".join(spread(row[name]["tandem_over_this"]) for name in arms[1:])
        print(
            f"{tokens:6d} {size_bytes / 1e6:5.1f} {row['prefill_ms']['median']:11.0f} {row['link_ms']:8.0f}"
            f"   {medians}; {over}"
        )
    document = {"rate": rate, "streaming": streaming, "requests": requests, "rows": rows}
    write("link" if streaming == "auto" else f"link_{streaming}", document)
