"""Requests with drafts, LoRA adapters or images through a pair of engines, beside one engine."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from prometheus_client import REGISTRY
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from testing import fork_server
from testing.adapters import RANK, lora_adapter
from testing.identity import prompts, random_prompt
from testing.models import IMAGE_TOKEN, llama, paddle_vl, repeating_gemma3, speculative_llama
from tests.campaigns.runner import Report
from tests.campaigns.shapes.pairs import Case, Shape, alone, engines, judge_each, stock

# ---- speculation --------------------------------------------------------------------------------

DRAFT_TOKENS = 32
ACCEPTANCE_TOLERANCE = 0.02
_DRAFTS = {"num_speculative_tokens": 3}


@dataclass(frozen=True)
class Models:
    """Path of the target model, and speculative_config of each side, if it speculates."""

    target: str
    prefill: dict[str, Any] | None
    decode: dict[str, Any]


def _ngram(folder: Path) -> Models:
    drafts = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1} | _DRAFTS
    return Models(repeating_gemma3(folder), None, drafts)


def _drafting(method: str, on_prefill: bool = True) -> Callable[[Path], Models]:
    def build(folder: Path) -> Models:
        made = speculative_llama(folder)
        drafts = {"method": method, "model": made.eagle if method == "eagle" else made.draft} | _DRAFTS
        return Models(made.target, drafts if on_prefill else None, drafts)

    return build


METHODS: dict[str, tuple[Callable[[Path], Models], bool]] = {
    "ngram_on_decode": (_ngram, True),
    "draft_model": (_drafting("draft_model"), True),
    "eagle": (_drafting("eagle"), True),
    # Decode has KV of drafts that prefill has not: the pair is refused at first contact.
    "draft_model_on_decode": (_drafting("draft_model", on_prefill=False), False),
}


def _counters() -> Counter[str]:
    """Return vLLM's counters of speculation, summed over the engines of this process."""
    counts = Counter[str]()
    for sample in (sample for metric in REGISTRY.collect() for sample in metric.samples):
        if sample.name.startswith("vllm:spec_decode_num_") and "per_pos" not in sample.name:
            counts[sample.name.removeprefix("vllm:spec_decode_num_")] += int(sample.value)
    return counts


async def _settled(before: Counter[str]) -> Counter[str]:
    """Return the counters once they have changed and stand still: they follow the tokens."""
    last = _counters()
    for _ in range(10):
        await asyncio.sleep(0.5)
        now = _counters()
        if now == last != before:
            break
        last = now
    return last


async def _speculate(models: Models, shape: Shape, cases: Sequence[Case], trace: Path, moves: bool) -> dict[str, Any]:
    sides = ({"speculative_config": models.prefill}, {"speculative_config": models.decode})
    async with engines(models.target, shape, trace, *sides) as pair:
        counts = [_counters()]
        references = await alone(pair.decode, cases, DRAFT_TOKENS)
        counts.append(await _settled(counts[0]))
        wrong, _ = await pair.send(cases, references, DRAFT_TOKENS)
        counts.append(await _settled(counts[1]))
        clean, (moved, _) = await pair.idle(), pair.received()
    # A request that continues from received KV begins with a step of placeholders, which vLLM
    # counts as one draft (v1/core/sched/scheduler.py, `pad_spec_decode`).
    lengths = []
    for before, after, placeholders in ((counts[0], counts[1], 0), (counts[1], counts[2], moved)):
        rounds, accepted = (after[name] - before[name] for name in ("drafts_total", "accepted_tokens_total"))
        lengths.append(1 + accepted / max(1, rounds - placeholders))
    movable = sum(case.movable for case in cases) if moves else 0
    return {"wrong": wrong, "moved": moved, "movable": movable, "clean": clean, "acceptance": lengths}


def speculation(report: Report, *, count: int = 100, only: str = "", pairs: str = "1:1,1:2") -> None:
    """Tokens of one engine, and as many accepted drafts a step, within 2%."""
    fork_server.prepare()
    cases = [Case(prompt) for prompt in prompts(count, 700, seed=7)]
    for name, (build, moves) in METHODS.items():
        if only not in name:
            continue
        models = build(report.folder / name)

        async def play(shape: Shape, trace: Path, models: Models = models, moves: bool = moves) -> dict[str, Any]:
            found = await _speculate(models, shape, cases, trace, moves)
            own, with_pair = found["acceptance"]
            if own <= 1 or abs(with_pair / own - 1) > ACCEPTANCE_TOLERANCE:
                found["wrong"].append(f"acceptance length {with_pair:.3f}, alone {own:.3f}")
            return found

        judge_each(report, name, pairs.split(","), play)


# ---- adapters -----------------------------------------------------------------------------------

ADAPTERS, PROMPTS = 4, 24


def adapter_cases(count: int, folder: Path, model: str) -> list[Case]:
    """Return random requests to adapters and the base model.

    The same prompts go to every adapter, so KV of another adapter would be taken for one's own if
    keys did not tell them apart. Every tenth names an adapter that prefill lacks: under that
    name prefill computes with the base model, or with an adapter of other content.
    """

    def adapter(name: str, number: int, seed: int) -> LoRARequest:
        path = lora_adapter(folder / f"{name}-{seed}", Path(model), seed)
        return LoRARequest(name, number, str(path))

    *made, stranger = (adapter(f"adapter-{number}", number, number) for number in range(1, ADAPTERS + 1))
    impostor = adapter(stranger.lora_name, stranger.lora_int_id, 9)
    texts = [prompt for prompt in prompts(PROMPTS + 2, 400, seed=7) if len(prompt) > 2]
    rng, todo = random.Random(5), []
    for number in range(count):
        own = rng.choice([None, *made])
        prefill, decode = (own, own) if number % 10 else (rng.choice([None, impostor]), stranger)
        name = "base model" if decode is None else decode.lora_name
        todo.append(Case(rng.choice(texts), name, {"lora": prefill}, {"lora": decode}, moves=bool(number % 10)))
    return todo


def adapters(report: Report, *, count: int = 500, pairs: str = "1:1,1:2", damage: float = 0.0) -> None:
    """Requests over three adapters and the base model, eight at a time."""
    fork_server.prepare()
    folder = report.folder
    model = llama(folder / "model")
    cases = adapter_cases(count, folder, model)
    # One slot more than adapters: `actors/upstream/cpu_build/vllm_cpu_kernels.py`.
    engine = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": ADAPTERS + 1}

    async def play(shape: Shape, trace: Path) -> dict[str, Any]:
        unique = {(tuple(case.prompt), case.name): case for case in cases}
        answers = await stock(model, shape.tp[1], list(unique.values()), damage=damage, **engine)
        found = dict(zip(unique, answers, strict=True))
        alike = len(answers) - len({answer.logprobs[0] for answer in answers})
        report.check(not alike, f"{alike} adapters answer like another, which could hide a mistake")
        references = [found[tuple(case.prompt), case.name] for case in cases]
        async with engines(model, shape, trace, engine | {"enable_prefix_caching": True}, engine) as pair:
            for side, legs in ((pair.prefill, "prefill"), (pair.decode, "decode")):
                # Servers load an adapter before its first request, too.
                named = {one.lora_path: one for case in cases if (one := getattr(case, legs)["lora"])}
                for one in named.values():
                    await side.add_lora(one)
            wrong, _ = await pair.send(cases, references, at_once=8)
            clean, (moved, failed) = await pair.idle(), pair.received()
        movable = sum(case.movable for case in cases)
        wrong += [f"{failed} of {len(cases) - movable} requests were recomputed"] * (failed != len(cases) - movable)
        return {"wrong": wrong, "of": len(cases), "moved": moved, "movable": movable, "clean": clean}

    judge_each(report, "adapters", pairs.split(","), play)


# ---- images -------------------------------------------------------------------------------------

SIZES = ((48, 64), (64, 48), (32, 32), (160, 96), (90, 130))
"""Width and height in pixels."""


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """Return an image of coarse random colours; seeds differ in every part of it."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(pixels.repeat(8, 0).repeat(8, 1)[:height, :width])


def _image_case(
    name: str, rng: random.Random, images: Sequence[Image.Image], others: Sequence[Image.Image] = ()
) -> Case:
    """Return random text around images; ``others`` replace them in the prefill leg."""
    prompt: list[int] = []
    for _ in images:
        prompt += [*random_prompt(rng.randrange(120), rng.randrange(10**6)), IMAGE_TOKEN]
    prompt += random_prompt(rng.choice([1, 2, 31, 32, 33, 90]), rng.randrange(10**6))
    return Case(prompt, name, {"images": others or images}, {"images": images}, moves=not others)


def image_cases(count: int) -> dict[str, list[Case]]:
    """Return requests by kind.

    mixed     one to three images, or text
    equal     one prompt with images of equal size, which only the keys tell apart
    repeated  two prompts around a new image: prefill encodes the image for the first one only
    other     the prefill leg has another image of equal size: decode must compute the prompt
    """
    rng = random.Random(3)
    gallery = [picture(10 * kind + index, size) for index, size in enumerate(SIZES) for kind in range(4)]
    mixed = [_image_case("mixed", rng, rng.choices(gallery, k=1 + number % 3)) for number in range(count)]
    mixed += [Case(random_prompt(rng.randrange(2, 400), number), "text") for number in range(count // 3)]
    rng.shuffle(mixed)
    return {
        "mixed": mixed,
        "equal": [_image_case("equal", random.Random(4), [picture(100 + n, SIZES[0])]) for n in range(6)],
        "repeated": [_image_case("repeated", random.Random(seed), [picture(400, SIZES[3])]) for seed in (6, 7)],
        "other": [
            _image_case("other", random.Random(5), [picture(200 + n, SIZES[0])], [picture(300 + n, SIZES[0])])
            for n in range(6)
        ],
    }


async def _encoder_runs(engine: AsyncLLM) -> int:
    """Return the runs of the first rank's encoder since the last call."""
    requests = (await engine.collective_rpc("get_encoder_timing_stats"))[0]
    return sum(stats["num_encoder_calls"] for stats in requests.values())


def images(report: Report, *, count: int = 50, pairs: str = "1:1,1:2", damage: float = 0.0) -> None:
    """One to three images a prompt, four requests at a time; only prefill encodes them."""
    fork_server.prepare()
    folder = report.folder
    model = paddle_vl(folder / "model")
    by_kind = image_cases(count)
    cases = [case for some in by_kind.values() for case in some]
    engine: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "enable_mm_processor_stats": True,
        "limit_mm_per_prompt": {"image": 3},
    }

    async def play(shape: Shape, trace: Path) -> dict[str, Any]:
        answers = await stock(model, shape.tp[1], cases, damage=damage, **engine)
        wanted = {id(case): answer for case, answer in zip(cases, answers, strict=True)}
        report.check(
            len({wanted[id(case)].logprobs[0] for case in by_kind["equal"]}) == len(by_kind["equal"]),
            "images of equal size have equal answers, which could hide a mistake",
        )
        found: dict[str, Any] = {"wrong": [], "moved": 0, "movable": sum(case.movable for case in cases)}
        async with engines(model, shape, trace, engine | {"enable_prefix_caching": True}, engine) as pair:
            runs: dict[str, list[list[int]]] = {}
            for kind, some in by_kind.items():
                for group in [some] if kind in ("mixed", "equal") else [[case] for case in some]:
                    wrong, _ = await pair.send(group, [wanted[id(case)] for case in group], at_once=4)
                    found["wrong"] += wrong
                    runs.setdefault(kind, []).append(
                        [await _encoder_runs(pair.prefill), await _encoder_runs(pair.decode)]
                    )
            found["clean"] = await pair.idle()
            found["moved"], recomputed = pair.received()
        found["encoder_runs"] = runs
        ours = [one for kind, some in runs.items() if kind != "other" for one in some]
        if any(decode for _, decode in ours) or not runs["mixed"][0][0]:
            found["wrong"].append(f"decode has encoded images whose KV prefill sent, or prefill none: {runs}")
        if [prefill for prefill, _ in runs["repeated"]] != [1, 0]:
            found["wrong"].append(f"prefill's runs for a repeated image: {runs['repeated']}")
        if recomputed != len(by_kind["other"]):
            found["wrong"].append(f"{recomputed} requests with another image on prefill were recomputed")
        return found

    judge_each(report, "images", pairs.split(","), play)
