"""First and second token over a slow link, sampled by decode and by prefill (`router.first_token`).

    python -m benchmarks.first_token [--requests 6] [--rate 80mbit]
        [--lengths 250,500,1000]  (root)

One pair of engines, as in ``benchmarks.link``: prefill in a network namespace, decode outside of
it, KV over TCP at the rate. Both settings alternate, request by request, over the same engines:

    decode   prefill computes all tokens but the last; decode samples the first token
    prefill  prefill sends the KV of whole blocks and samples the first token; decode repeats it

The first token comes from the sampling engine, the second from decode. The benchmark uses no
router and no HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.link import SETTLES_S, bits_a_second, start
from benchmarks.namespace import Namespace, namespace
from benchmarks.report import ratios, summary, write
from testing.engines import describe
from testing.models import VOCABULARY, SizedModel, wide_llama

SETTINGS = ("decode", "prefill")
TOKENS = 2


async def tokens(
    engine: AsyncLLM, prompt: list[int], count: int, transfer: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """The tokens of a greedy answer, and the arrival time of each."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": transfer},
    )
    at: list[float] = []
    found: list[int] = []
    async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, uuid.uuid4().hex):
        found = list(output.outputs[0].token_ids)
        at += [time.monotonic()] * (len(found) - len(at))
    return found, at


class Bench:
    def __init__(self, prefill: AsyncLLM, decode: AsyncLLM, address: dict[str, Any]) -> None:
        self.prefill, self.decode = prefill, decode
        self.multiple = address.pop("first_token_multiple")
        self.address = address
        self.disagreed = 0

    async def ask(self, setting: str, prompt: list[int]) -> tuple[float, float]:
        """Time to the first and to the second token, in ms."""
        transfer_id = uuid.uuid4().hex
        produce = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        consume = self.address | {"transfer_id": transfer_id}
        if setting == "prefill":
            produce["first_token"] = True
            consume["prompt_multiple"] = self.multiple
        started = time.monotonic()
        (first, prefilled), (found, decoded) = await asyncio.gather(
            tokens(self.prefill, prompt, 1, produce), tokens(self.decode, prompt, TOKENS, consume)
        )
        if setting == "prefill":
            self.disagreed += first[0] != found[0]
        await asyncio.sleep(SETTLES_S)
        heard = min(prefilled[0], decoded[0]) if setting == "prefill" else decoded[0]
        return 1e3 * (heard - started), 1e3 * (decoded[1] - started)


async def measure(model: SizedModel, place: Namespace, requests: int, lengths: list[int], rate: str) -> dict[str, Any]:
    decode, _ = start("tandem", "kv_consumer", model.path, place)
    prefill, _ = start("tandem", "kv_producer", model.path, place)
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    rng = random.Random(0)
    try:
        bench = Bench(prefill, decode, await describe(prefill))
        for number in range(-1, requests):
            for length in lengths:
                for setting in rng.sample(SETTINGS, len(SETTINGS)):
                    prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
                    sample = await asyncio.wait_for(bench.ask(setting, prompt), 120)
                    if number >= 0:  # the first round is a warm-up
                        found[length, setting].append(sample)
    finally:
        prefill.shutdown()
        decode.shutdown()
    rows = []
    for length in lengths:
        size_bytes = length * model.shape["token_bytes_a_layer"] * model.shape["full_layers"]
        row: dict[str, Any] = {"prompt_tokens": length, "link_ms": 8e3 * size_bytes / bits_a_second(rate)}
        for index, name in enumerate(("first", "second")):
            times = {setting: [sample[index] for sample in found[length, setting]] for setting in SETTINGS}
            row[name] = {f"{setting}_ms": summary(times[setting]) for setting in SETTINGS}
            row[name]["prefill_over_decode"] = ratios(times["prefill"], times["decode"])
        rows.append(row)
    return {"rate": rate, "requests": requests, "rows": rows, "other_first_tokens": bench.disagreed}


def show(document: dict[str, Any]) -> None:
    print("tokens  link ms   token    decode ms  prefill ms   prefill over decode (quartiles)")
    for row in document["rows"]:
        for name in ("first", "second"):
            one, ratio = row[name], row[name]["prefill_over_decode"]
            print(
                f"{row['prompt_tokens']:6d} {row['link_ms']:8.0f}   {name:6s} {one['decode_ms']['median']:11.0f}"
                f" {one['prefill_ms']['median']:11.0f}"
                f"   {ratio['of_medians']:.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})",
                flush=True,
            )
    print(f"first tokens of prefill that decode did not repeat: {document['other_first_tokens']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--rate", default="80mbit")
    parser.add_argument("--lengths", default="250,500,1000")
    arguments = parser.parse_args()
    bits_a_second(arguments.rate)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder, namespace(arguments.rate) as place:
        model = wide_llama(Path(folder) / "model")
        document = asyncio.run(measure(model, place, arguments.requests, lengths, arguments.rate))
    show(document)
    print("\nwritten:", write(f"first_token_{arguments.rate}", document))


if __name__ == "__main__":
    main()
