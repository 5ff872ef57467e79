"""TTFT over a slow link: Tandem's streaming, the same transfer as a whole, and vLLM's
NixlConnector.

Prefill and decode engines run on two hosts of one machine (``testing.hosts``). KV travels over TCP
through a link with RATE; with an empty rate, over shared memory on one host. The model has much KV
and little computation, so that a prompt's prefill takes about as long as its transfer;
``MODEL=hybrid`` is that of ``benchmarks.handover``. Four arms, interleaved request by request, with
the other arms' processes stopped:

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
import re
import tempfile
import time
import uuid
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engines import PLAIN, ROLES, Arm, Side, random_prompt, start_arms, start_side
from benchmarks.report import ratios, spread, summary, turns, write
from testing.engines import Answer, generate
from testing.hosts import Switch, hosts
from testing.models import WINDOW_TOKENS, SizedModel, benchmark_gemma3, wide_llama
from testing.sequential_proxy import PRODUCE

ARMS = ("tandem", "whole", "pull", "push")
MODELS = {"wide": wide_llama, "hybrid": benchmark_gemma3}
CONNECTORS = {"tandem": "TandemConnector", "pull": "NixlConnector", "push": "NixlPushConnector"}
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "enable_prefix_caching": False}
DECODE_TOKENS = 2
NIXL_FIRST_PORT = 5700
SETTLES_S = 0.3
"""Pause after a request in which its blocks are freed, before its arm is stopped."""


def start(connector: str, role: str, model: str, link: Switch | None, streaming: str = "auto") -> Side:
    number = 10 * list(CONNECTORS).index(connector) + 1 - ROLES.index(role)
    variables = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_FIRST_PORT + number)}
    settings = {"streaming": streaming}
    if link is not None:
        settings["side_channel_host"] = variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = link.hosts[role].address
    own = {"connector": CONNECTORS[connector], "transfer": settings if connector == "tandem" else {}}
    return start_side(model, role, link, variables, **ENGINE | own)


def ideal_bytes(model: dict[str, int], tokens: int) -> int:
    """Return the bytes of KV that decode needs to continue after ``tokens`` prompt tokens."""
    window = min(tokens, WINDOW_TOKENS)
    return model["token_bytes_a_layer"] * (model["full_layers"] * tokens + model.get("sliding_layers", 0) * window)


def bits_a_second(rate: str) -> float:
    """Parse ``800mbit``, in tc's notation. Raises SystemExit for other notations."""
    match = re.fullmatch(r"(\d+)(k|m|g)bit", rate)
    if match is None:
        raise SystemExit(f"rate {rate!r}: write a number and kbit, mbit or gbit, as for tc")
    return int(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


async def connect(arm: Arm) -> None:
    """Send a request, whose prefill answer has the address of vLLM's connector."""
    with arm.awake():
        # Push matches its legs by their id.
        answer = await arm.in_turn([3] * 40, 1, request_id=uuid.uuid4().hex)
        arm.pair.address = dict(answer.prefill.transfer)


async def pushed(arm: Arm, prompt: list[int]) -> Answer:
    """Send both legs at once with one request id, by which this connector finds the blocks."""
    one: dict[str, Any] = PLAIN | {"request_id": uuid.uuid4().hex}
    consume = arm.pair.address | {"remote_request_id": one["request_id"]}
    prefill, decode = await asyncio.gather(
        generate(arm.pair.prefill, prompt, 1, PRODUCE, **one),
        generate(arm.pair.decode, prompt, DECODE_TOKENS, consume, **one),
    )
    return replace(decode, prefill=prefill)


async def measure(
    model: SizedModel,
    link: Switch | None,
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
        arms = await start_arms(stack, engines, lambda name, role: start(name, role, model.path, link, streaming))
        for name in engines:
            if name != "tandem":
                await connect(arms[name])
        for tokens, name, counted in turns(names, requests, lengths):
            arm, prompt = arms["tandem" if name == "whole" else name], random_prompt(dice, tokens)
            with arm.awake():
                started = time.monotonic()
                if name == "tandem":
                    sent = arm.together(prompt, DECODE_TOKENS)
                else:
                    sent = pushed(arm, prompt) if name == "push" else arm.in_turn(prompt, DECODE_TOKENS)
                answer = await asyncio.wait_for(sent, 120)
                await asyncio.sleep(SETTLES_S)
            if counted:
                times = answer.token_at[0] - started, answer.prefill.token_at[0] - started
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
        link = stack.enter_context(hosts(ROLES, rate)) if rate else None
        made = MODELS[model](Path(folder) / "model")
        found = asyncio.run(measure(made, link, lengths, arms, requests, streaming))
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
