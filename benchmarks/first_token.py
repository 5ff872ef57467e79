"""Time to the first and second token over a slow link, compared with other deployments.

    python -m benchmarks.first_token [--requests 4] [--rate 80mbit]
        [--lengths 250,500,1000,2000] [--methods stopped,alive]  (root)

The model and the namespaces are those of ``benchmarks.link``: prefill engines over the link run in
a network namespace. Prefill engines have the first cores, decode engines the last one. Arms, in
random order for each prompt length:

link    Tandem over the link; prefill samples the first token (``router.first_token: prefill``)
decode  the same engines; decode samples the first token (``router.first_token: decode``)
memory  Tandem over shared memory; prefill samples the first token
alone   one vLLM engine without a connector on the cores of prefill engines
nixl    NixlConnector over the link: the prefill leg, then the decode leg

Two methods: ``stopped`` runs one arm's processes at a time; the others are stopped (SIGSTOP).
``alive`` keeps all running but NixlConnector's, whose progress threads spin when idle. Both wait
1.5 s before each request, because vLLM's workers spin for a second after a step. The first token
comes from the sampling engine, the second from decode. The benchmark uses no router and no HTTP.
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

from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.handover import in_turn
from benchmarks.link import ENGINE, SETTLES_S, bits_a_second, start
from benchmarks.namespace import Namespace, namespace
from benchmarks.report import ratios, summary, write
from testing.engines import describe, start_engine
from testing.legs import leg
from testing.models import VOCABULARY, SizedModel, wide_llama
from testing.processes import Arm, Processes, children, own_cores, pin

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

Times = dict[tuple[int, str], list[tuple[float, float]]]
"""Milliseconds to the first and to the second token of each request, by prompt tokens and arm."""


@dataclass
class Bench:
    """Engines of all arms, and the answers of Tandem's prefill engines to ``describe``.

    ``handed_over``         number of requests whose first token prefill sampled
    ``other_first_tokens``  number of those whose first token decode did not repeat
    """

    pairs: dict[str, Arm]
    alone: AsyncLLM
    alone_processes: Processes
    addresses: dict[str, dict[str, Any]]
    handed_over: int = 0
    other_first_tokens: int = 0

    def processes(self, arm: str) -> Processes:
        return self.alone_processes if arm == "alone" else self.pairs["link" if arm == "decode" else arm]

    def wake(self) -> None:
        for arm in ARMS:
            self.processes(arm).wake()

    async def ask(self, arm: str, prompt: list[int]) -> tuple[float, float]:
        """Return the milliseconds to the first and to the second token of one request."""
        started = time.monotonic()
        if arm == "alone":
            at = (await leg(self.alone, prompt, TOKENS, None)).token_at
        elif arm == "nixl":
            _, decode = await in_turn(self.pairs[arm], prompt, TOKENS)
            at = decode.token_at
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
        prefill, decode = await asyncio.gather(
            leg(pair.prefill, prompt, 1, produce), leg(pair.decode, prompt, TOKENS, consume)
        )
        first, found = (list(one.output.outputs[0].token_ids) for one in (prefill, decode))
        at = list(decode.token_at)
        if from_prefill:
            self.handed_over += 1
            self.other_first_tokens += first[0] != found[0]
            at[0] = min(prefill.first_token_at, at[0])
        return at


def start_all(stack: contextlib.ExitStack, model: str, prefill_host: Namespace) -> Bench:
    """Start all engines; they end with the stack.

    Starts those outside the namespace first, as ``benchmarks.link.start_arms`` explains.
    """
    cores = own_cores()

    def outside(role: str | None, pinned: list[int]) -> tuple[AsyncLLM, set[int]]:
        before = children()
        engine = start_engine(model, 1, role, **ENGINE)
        stack.callback(engine.shutdown)
        pids = children() - before
        pin(pids, pinned)
        return engine, pids

    def over_link(name: str, role: str) -> tuple[AsyncLLM, set[int]]:
        engine, pids = start(name, role, model, prefill_host)
        stack.callback(engine.shutdown)
        if name == "pull":
            # Its progress threads spin, and other engines would not get a core to start.
            processes = Processes(sorted(pids))
            processes.sleep()
            stack.callback(processes.wake)
        return engine, pids

    alone, alone_pids = outside(None, cores[:-1] or cores)
    decodes = {
        "memory": outside("kv_consumer", cores[-1:]),
        "link": over_link("tandem", "kv_consumer"),
        "nixl": over_link("pull", "kv_consumer"),
    }
    prefills = {
        "memory": outside("kv_producer", cores[:-1] or cores),
        "link": over_link("tandem", "kv_producer"),
        "nixl": over_link("pull", "kv_producer"),
    }
    pairs = {
        name: Arm(sorted(prefills[name][1] | decodes[name][1]), name, prefills[name][0], decodes[name][0])
        for name in decodes
    }
    bench = Bench(pairs, alone, Processes(sorted(alone_pids)), {})
    stack.callback(bench.wake)  # before the engines' shutdown, which a stopped process would not see
    return bench


@contextlib.contextmanager
def running(bench: Bench, arm: str, method: str) -> Iterator[None]:
    """Run the processes of ``arm`` during the block; with ``stopped``, no others run."""
    if method == "stopped" or arm == "nixl":
        with bench.processes(arm).awake():
            yield
    else:
        yield


async def rounds(bench: Bench, method: str, requests: int, lengths: list[int], rng: random.Random) -> Times:
    """Return the times of ``requests`` requests per length and arm, after one round of warm-up."""
    found: Times = defaultdict(list)
    for arm in ARMS:
        if method == "stopped" or arm == "nixl":
            bench.processes(arm).sleep()
    for number in range(-1, requests):
        for length in lengths:
            for arm in rng.sample(ARMS, len(ARMS)):
                prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
                with running(bench, arm, method):
                    await asyncio.sleep(PAUSE_S)
                    sample = await asyncio.wait_for(bench.ask(arm, prompt), 120)
                if number >= 0:
                    found[length, arm].append(sample)
        print(f"{method}: round {number + 1} of {requests}", flush=True)
    bench.wake()
    return found


async def measure(
    model: SizedModel, prefill_host: Namespace, requests: int, lengths: list[int], rate: str, methods: list[str]
) -> dict[str, Any]:
    rng = random.Random(0)
    with contextlib.ExitStack() as stack:
        bench = start_all(stack, model.path, prefill_host)
        for name in ("link", "memory"):
            bench.addresses[name] = await describe(bench.pairs[name].prefill)
        found = {method: await rounds(bench, method, requests, lengths, rng) for method in methods}
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
    counts = {"handed_over": bench.handed_over, "other_first_tokens": bench.other_first_tokens}
    return {"rate": rate, "requests": requests, "rows": rows, **counts}


def show(document: dict[str, Any]) -> None:
    print("method   tokens  link ms   token   " + "".join(f"{arm:>8}" for arm in ARMS) + "  (ms)   ratios (quartiles)")
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
    print(f"decode repeated another first token {document['other_first_tokens']} of {document['handed_over']} times")


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
    if arguments.requests < 2:
        parser.error(f"--requests {arguments.requests}: quartiles need at least 2")
    if not set(methods) <= set(METHODS):
        parser.error(f"--methods {arguments.methods!r}: write names of {', '.join(METHODS)}, separated by commas")
    with tempfile.TemporaryDirectory() as folder, namespace(arguments.rate) as prefill_host:
        model = wide_llama(Path(folder) / "model")
        document = asyncio.run(measure(model, prefill_host, arguments.requests, lengths, arguments.rate, methods))
    show(document)
    print("\nwritten:", write(f"first_token_{arguments.rate}", document))


if __name__ == "__main__":
    main()
