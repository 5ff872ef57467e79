"""Prompts with one to three images beside prompts of text: a pair of engines gives one engine's
answers, only prefill encodes images, and images of equal size are told apart.

    python -m tests.campaigns.shapes.images [--prompts 50] [--pairs 1:1,1:2]

(``make images``). The model is a tiny PaddleOCR-VL. The references come from one stock engine of
decode's tensor-parallel size. Each pair then gets

    mixed      ``--prompts`` prompts with images and a third as many without, four at a time
    equal      one prompt with ``TWINS`` images of equal size in turn
    other      the same, but the prefill leg has another image of equal size: decode must compute
               the prompt, with its own image
    repeated   two prompts around a new image: prefill encodes the image for the first one only

Prefill caches prefixes, so KV of another image would be taken for one's own if its keys did not
tell them apart.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vllm.v1.engine.async_llm import AsyncLLM

from testing import fork_server
from testing.engines import Answer, Pair, describe, generate, start_engine
from testing.identity import MAX_TOKENS, difference, random_prompt
from testing.models import IMAGE_TOKEN, paddle_vl
from testing.trace import read_trace

CONCURRENCY = 4
SIZES = ((48, 64), (64, 48), (32, 32), (160, 96), (90, 130))
"""Width and height in pixels."""

KINDS = 4
"""Images of each size."""

TWINS = 6
MOST_TEXT = 120
ENGINE = {
    "skip_tokenizer_init": False,
    "enable_mm_processor_stats": True,
    "limit_mm_per_prompt": {"image": 3},
}


@dataclass(frozen=True)
class Case:
    """A prompt, its images, and those of the prefill leg if they differ."""

    name: str
    prompt: list[int]
    images: tuple[Image.Image, ...]
    prefill_images: tuple[Image.Image, ...] | None = None


@dataclass
class Result:
    """``moved`` of ``movable`` requests got their KV from prefill; decode computed ``recomputed``
    of ``others``.

    ``alike``           images of equal size with another's answer, which could hide a mistake
    ``decode_encoded``  runs of decode's encoder for requests whose KV prefill sent
    ``others_encoded``  runs of decode's encoder for ``others``
    ``repeated``        runs of prefill's encoder for the first and for the second prompt around
                        an image
    """

    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    moved: int = 0
    movable: int = 0
    recomputed: int = 0
    others: int = 0
    alike: int = 0
    prefill_encoded: int = 0
    decode_encoded: int = 0
    others_encoded: int = 0
    repeated: tuple[int, int] = (0, 0)
    clean: bool = False

    @property
    def good(self) -> bool:
        complete = (self.moved, self.recomputed) == (self.movable, self.others)
        once = self.decode_encoded == 0 and self.prefill_encoded > 0 and self.repeated == (1, 0)
        return not self.wrong and complete and once and self.alike == 0 and self.clean


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """Return an image of coarse random colours; seeds differ in every part of it."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(pixels.repeat(8, 0).repeat(8, 1)[:height, :width])


def prompt_with(images: int, rng: random.Random) -> list[int]:
    """Return random text with ``images`` placeholders; the last one may end the prompt but for one
    token.
    """
    prompt: list[int] = []
    for _ in range(images):
        prompt += [*random_prompt(rng.randrange(MOST_TEXT), rng.randrange(10**6)), IMAGE_TOKEN]
    return prompt + random_prompt(rng.choice([1, 2, 31, 32, 33, 90]), rng.randrange(10**6))


def mixed_cases(count: int, seed: int = 3) -> list[Case]:
    """Return ``count`` prompts with one to three images and a third as many without, shuffled."""
    rng = random.Random(seed)
    gallery = [picture(10 * kind + index, size) for index, size in enumerate(SIZES) for kind in range(KINDS)]
    todo = []
    for number in range(count):
        images = tuple(rng.choice(gallery) for _ in range(1 + number % 3))
        todo.append(Case("mixed", prompt_with(len(images), rng), images))
    todo += [Case("text", random_prompt(rng.randrange(2, 400), number), ()) for number in range(count // 3)]
    rng.shuffle(todo)
    return todo


def equal_cases() -> list[Case]:
    """Return one prompt with images of equal size."""
    prompt = prompt_with(1, random.Random(4))
    return [Case("equal", prompt, (picture(100 + number, SIZES[0]),)) for number in range(TWINS)]


def other_cases() -> list[Case]:
    """Return a prompt whose legs have different images of equal size."""
    prompt = prompt_with(1, random.Random(5))
    pairs = [(picture(200 + number, SIZES[0]), picture(300 + number, SIZES[0])) for number in range(TWINS)]
    return [Case("other", prompt, (own,), (prefills,)) for own, prefills in pairs]


def repeated_cases() -> list[Case]:
    """Return two prompts around one image that no other case has."""
    image = picture(400, SIZES[3])
    return [Case("repeated", prompt_with(1, random.Random(seed)), (image,)) for seed in (6, 7)]


async def references(model: str, tp_size: int, todo: Sequence[Case]) -> list[Answer]:
    """Return the answers of one stock engine."""
    engine = start_engine(model, tp_size, None, **ENGINE)
    try:
        return [await generate(engine, case.prompt, MAX_TOKENS, images=case.images) for case in todo]
    finally:
        engine.shutdown()


async def run(model: str, tp: tuple[int, int], todo: Sequence[Case], wanted: Sequence[Answer], trace: Path) -> Result:
    """Start a pair, send all requests through it, and count its encoders' runs."""
    result = Result(checked=len(todo), movable=sum(case.name != "other" for case in todo))
    result.others = len(todo) - result.movable
    started: list[AsyncLLM] = []
    try:
        for role, size, caching in (("kv_producer", tp[0], True), ("kv_consumer", tp[1], False)):
            transfer = {"trace_path": str(trace), "lease_s": 5.0}
            started.append(start_engine(model, size, role, transfer=transfer, enable_prefix_caching=caching, **ENGINE))
        prefill, decode = started
        pair = Pair(prefill, decode, await describe(prefill))
        slots = asyncio.Semaphore(CONCURRENCY)

        async def send(case: Case, reference: Answer) -> None:
            async with slots:
                answer = await pair.together(
                    case.prompt, MAX_TOKENS, images=case.images, prefill_images=case.prefill_images
                )
            problem = difference(reference, answer)
            if problem:
                result.wrong.append(f"{case.name}, {len(case.images)} images, {len(case.prompt)} tokens: {problem}")

        def of(*names: str) -> list[tuple[Case, Answer]]:
            return [(case, answer) for case, answer in zip(todo, wanted, strict=True) if case.name in names]

        await asyncio.gather(*(send(*each) for each in of("mixed", "text", "equal")))
        result.prefill_encoded = await encoder_runs(prefill)
        repeated = []
        for each in of("repeated"):
            await send(*each)
            repeated.append(await encoder_runs(prefill))
        result.repeated = (repeated[0], repeated[1])
        result.decode_encoded = await encoder_runs(decode)
        for each in of("other"):
            await send(*each)
        result.others_encoded = await encoder_runs(decode)
        result.clean = await idle(started)
    finally:
        for engine in reversed(started):
            engine.shutdown()
    first = {answer.logprobs[0] for _, answer in of("equal")}
    result.alike = len(of("equal")) - len(first)
    whole, failures = Counter[str](), Counter[str]()
    for event in read_trace(trace):
        if event["event"] == "received":
            whole[event["request"]] += event["failure"] is None
            failures[event["request"]] += event["failure"] is not None
    result.moved = sum(count == tp[1] for count in whole.values())
    result.recomputed = sum(count > 0 for count in failures.values())
    return result


async def encoder_runs(engine: Any) -> int:
    """Return the runs of the first rank's encoder since the last call."""
    requests = (await engine.collective_rpc("get_encoder_timing_stats"))[0]
    return sum(stats["num_encoder_calls"] for stats in requests.values())


async def idle(engines: Sequence[Any], within_s: float = 20.0) -> bool:
    """Return whether all blocks return to their pools in time."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not all([await engine.reset_prefix_cache() for engine in engines]):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def main() -> None:
    fork_server.prepare()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50, help="prompts with images")
    parser.add_argument("--pairs", default="1:1,1:2", help="prefill:decode tensor-parallel sizes")
    arguments = parser.parse_args()
    todo = [*mixed_cases(arguments.prompts), *equal_cases(), *repeated_cases(), *other_cases()]
    wanted: dict[int, list[Answer]] = {}
    failed = 0
    for each in arguments.pairs.split(","):
        tp = tuple(map(int, each.split(":")))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = paddle_vl(folder / "model")
            if tp[1] not in wanted:
                wanted[tp[1]] = asyncio.run(references(model, tp[1], todo))
            result = asyncio.run(run(model, (tp[0], tp[1]), todo, wanted[tp[1]], folder / "trace.jsonl"))
        failed += not result.good
        print(
            f"TP {tp[0]} -> {tp[1]}: {result.checked - len(result.wrong)} of {result.checked} equal, "
            f"{result.moved} of {result.movable} requests' KV moved, "
            f"{result.recomputed} of {result.others} with another image on prefill recomputed, "
            f"{result.alike} answers to images of equal size alike; encoder runs: prefill {result.prefill_encoded}, "
            f"decode {result.decode_encoded} (and {result.others_encoded} for recomputed), a repeated image "
            f"{result.repeated[0]} then {result.repeated[1]}; "
            f"block pools {'at baseline' if result.clean else 'NOT at baseline'}: {'good' if result.good else 'BAD'}",
            flush=True,
        )
        for line in result.wrong:
            print("   ", line, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
