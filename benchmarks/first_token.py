"""First and second token over a slow link, beside shared memory, one vLLM engine and NixlConnector.

    python -m benchmarks.first_token [--requests 4] [--rate 80mbit]
        [--lengths 250,500,1000,2000] [--methods stopped,alive]  (root)

The model and the namespaces are those of ``benchmarks.link``: prefill engines over the link run in
a network namespace. Prefill engines have the first cores, decode engines the last one. Arms, in
random order for each prompt length:

link    Tandem over the link; prefill samples the first token (``router.first_token: prefill``)
decode  the same engines; decode samples the first token (``router.first_token: decode``)
memory  Tandem over shared memory; prefill samples the first token
alone   one vLLM engine without a connector on the cores of prefill engines
nixl    NixlConnector over the link, its legs one after the other, as its protocol requires

Two methods: ``stopped`` stops the processes of all arms but one (SIGSTOP). ``alive`` stops only
NixlConnector's, whose progress threads spin when idle, and waits 1.5 s before each request, because
vLLM's workers spin for a second after a step. The first token comes from the sampling engine, the
second from decode. The benchmark uses no router and no HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.link import ENGINE, SETTLES_S, bits_a_second, start
from benchmarks.namespace import Namespace, namespace
from benchmarks.report import ratios, summary, write
from testing.engines import describe, start_engine
from testing.models import VOCABULARY, SizedModel, wide_llama
from testing.processes import Arm, Processes, children, own_cores, pin
from testing.sequential_proxy import PRODUCE

ARMS = ("link", "decode", "memory", "alone", "nixl")
METHODS = ("stopped", "alive")
TOKENS = 2
PAUSE_S = 1.5
AIMS = (
    ("first", "link", "memory", 1.05),
    ("first", "link", "alone", 1.05),
    ("second", "link", "decode", 1.02),
    ("first", "link", "nixl", None),
)
"""Ratios to report: token, arm, arm to compare with, and the largest ratio aimed at."""

Times = dict[tuple[int, str], list[tuple[float, float]]]
"""Milliseconds to the first and to the second token of each request, by prompt tokens and arm."""


async def tokens(
    engine: AsyncLLM, prompt: list[int], count: int, transfer: dict[str, Any] | None
) -> tuple[list[int], list[float], dict[str, Any] | None]:
    """Tokens of a greedy answer, arrival time of each, and the answer's transfer parameters."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )
    at: list[float] = []
    found: list[int] = []
    answered = None
    async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, uuid.uuid4().hex):
        found = list(output.outputs[0].token_ids)
        at += [time.monotonic()] * (len(found) - len(at))
        answered = output.kv_transfer_params
    return found, at, answered


@dataclass
class Bench:
    """Engines of all arms, and the answers of Tandem's prefill engines to ``describe``.

    ``other_first_tokens``  number of first tokens of prefill that decode did not repeat
    """

    pairs: dict[str, Arm]
    alone: AsyncLLM
    alone_processes: Processes
    addresses: dict[str, dict[str, Any]]
    other_first_tokens: int = 0

    def processes(self, arm: str) -> Processes:
        return self.alone_processes if arm == "alone" else self.pairs["link" if arm == "decode" else arm]

    def shutdown(self) -> None:
        self.alone_processes.wake()
        self.alone.shutdown()
        for pair in self.pairs.values():
            pair.shutdown()

    async def ask(self, arm: str, prompt: list[int]) -> tuple[float, float]:
        """Return the milliseconds to the first and to the second token of one request."""
        started = time.monotonic()
        if arm == "alone":
            _, at, _ = await tokens(self.alone, prompt, TOKENS, None)
        elif arm == "nixl":
            _, _, transfer = await tokens(self.pairs[arm].prefill, prompt, 1, PRODUCE)
            assert transfer is not None
            _, at, _ = await tokens(self.pairs[arm].decode, prompt, TOKENS, transfer)
        else:
            at = await self._tandem("link" if arm == "decode" else arm, prompt, from_prefill=arm != "decode")
        await asyncio.sleep(SETTLES_S)
        return 1e3 * (at[0] - started), 1e3 * (at[1] - started)

    async def _tandem(self, name: str, prompt: list[int], from_prefill: bool) -> list[float]:
        pair, address = self.pairs[name], dict(self.addresses[name])
        multiple = address.pop("first_token_multiple")
        transfer_id = uuid.uuid4().hex
        produce = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        consume = address | {"transfer_id": transfer_id}
        if from_prefill:
            produce["first_token"] = True
            consume["prompt_multiple"] = multiple
        (first, prefilled, _), (found, at, _) = await asyncio.gather(
            tokens(pair.prefill, prompt, 1, produce), tokens(pair.decode, prompt, TOKENS, consume)
        )
        if from_prefill:
            self.other_first_tokens += first[0] != found[0]
            at[0] = min(prefilled[0], at[0])
        return at


def start_all(model: str, place: Namespace) -> Bench:
    """Start the engines outside the namespace first, as ``benchmarks.link.start_arms`` explains."""
    before = children()
    alone = start_engine(model, 1, None, **ENGINE)
    alone_pids = children() - before
    cores = own_cores()
    pin(alone_pids, cores[:-1] or cores)
    before = children()
    prefill = start_engine(model, 1, "kv_producer", **ENGINE)
    prefill_pids = children() - before
    decode = start_engine(model, 1, "kv_consumer", **ENGINE)
    decode_pids = children() - before - prefill_pids
    pin(prefill_pids, cores[:-1] or cores)
    pin(decode_pids, cores[-1:])
    pairs = {"memory": Arm(sorted(prefill_pids | decode_pids), "memory", prefill, decode)}
    decodes = {name: start(name, "kv_consumer", model, place) for name in ("tandem", "pull")}
    for arm, name in (("link", "tandem"), ("nixl", "pull")):
        prefill, own = start(name, "kv_producer", model, place)
        decode, others = decodes[name]
        pairs[arm] = Arm(sorted(own | others), arm, prefill, decode)
    return Bench(pairs, alone, Processes(sorted(alone_pids)), {})


@contextlib.contextmanager
def running(bench: Bench, arm: str, method: str) -> Iterator[None]:
    """Let the processes of ``arm`` run in the block; with ``stopped``, no others do."""
    if method == "stopped" or arm == "nixl":
        with bench.processes(arm).awake():
            yield
    else:
        yield


async def rounds(bench: Bench, method: str, requests: int, lengths: list[int], rng: random.Random) -> Times:
    """Return the times of ``requests`` requests per length and arm, after one round of warm-up."""
    found: Times = defaultdict(list)
    everyone = {id(bench.processes(arm)): bench.processes(arm) for arm in ARMS if method == "stopped" or arm == "nixl"}
    for processes in everyone.values():
        processes.sleep()
    for number in range(-1, requests):
        for length in lengths:
            for arm in rng.sample(ARMS, len(ARMS)):
                prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
                with running(bench, arm, method):
                    if method == "alive":
                        await asyncio.sleep(PAUSE_S)
                    sample = await asyncio.wait_for(bench.ask(arm, prompt), 120)
                if number >= 0:
                    found[length, arm].append(sample)
    for processes in everyone.values():
        processes.wake()
    return found


async def measure(
    model: SizedModel, place: Namespace, requests: int, lengths: list[int], rate: str, methods: list[str]
) -> dict[str, Any]:
    bench = start_all(model.path, place)
    rng = random.Random(0)
    try:
        for name in ("link", "memory"):
            bench.addresses[name] = await describe(bench.pairs[name].prefill)
        found = {method: await rounds(bench, method, requests, lengths, rng) for method in methods}
    finally:
        bench.shutdown()
    rows = []
    for method, length in ((method, length) for method in methods for length in lengths):
        size_bytes = length * model.shape["token_bytes_a_layer"] * model.shape["full_layers"]
        row: dict[str, Any] = {"method": method, "prompt_tokens": length}
        row["link_ms"] = 8e3 * size_bytes / bits_a_second(rate)
        for index, token in enumerate(("first", "second")):
            times = {arm: [sample[index] for sample in found[method][length, arm]] for arm in ARMS}
            row[token] = {f"{arm}_ms": summary(times[arm]) for arm in ARMS}
            for which, arm, other, _ in AIMS:
                if which == token:
                    row[token][f"{arm}_over_{other}"] = ratios(times[arm], times[other])
        rows.append(row)
    return {"rate": rate, "requests": requests, "rows": rows, "other_first_tokens": bench.other_first_tokens}


def show(document: dict[str, Any]) -> None:
    print("method   tokens  link ms   token   " + "".join(f"{arm:>8}" for arm in ARMS) + "   ratios (quartiles), in ms")
    for row in document["rows"]:
        for token in ("first", "second"):
            one = row[token]
            medians = "".join(f"{one[f'{arm}_ms']['median']:8.0f}" for arm in ARMS)
            shown = []
            for _, arm, other, aim in (each for each in AIMS if each[0] == token):
                ratio = one[f"{arm}_over_{other}"]
                missed = aim is not None and ratio["of_medians"] > aim
                shown.append(
                    f"{arm}/{other} {ratio['of_medians']:.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})"
                    + (f" MISSED {aim}" if missed else "")
                )
            print(
                f"{row['method']:8} {row['prompt_tokens']:6d} {row['link_ms']:8.0f}   {token:6s}  {medians}   "
                + ", ".join(shown),
                flush=True,
            )
    print(f"first tokens of prefill that decode did not repeat: {document['other_first_tokens']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--rate", default="80mbit")
    parser.add_argument("--lengths", default="250,500,1000,2000")
    parser.add_argument("--methods", default=",".join(METHODS))
    arguments = parser.parse_args()
    bits_a_second(arguments.rate)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    methods = arguments.methods.split(",")
    if not set(methods) <= set(METHODS):
        parser.error(f"--methods {arguments.methods!r}: write names of {', '.join(METHODS)}, separated by commas")
    with tempfile.TemporaryDirectory() as folder, namespace(arguments.rate) as place:
        model = wide_llama(Path(folder) / "model")
        document = asyncio.run(measure(model, place, arguments.requests, lengths, arguments.rate, methods))
    show(document)
    print("\nwritten:", write(f"first_token_{arguments.rate}", document))


if __name__ == "__main__":
    main()
