"""Identity with one engine for every kind of KV cache, between engines of unequal shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from testing import fork_server
from testing.identity import LOGPROB_TOLERANCE, MAX_TOKENS, Outcome, prompts
from testing.models import deepseek_v2, falcon_h1, gemma3, gpt_oss, llama, llama4, qwen3_next
from tests.campaigns.runner import Report
from tests.campaigns.shapes.pairs import Case, Shape, alone, engines, judge_each, stock

LONGEST = 700


@dataclass(frozen=True)
class Family:
    """A kind of model: its creation, and its engines.

    ``prefill`` and ``decode`` are engine arguments of one side; ``tolerance`` is that of the first
    token's logprob, ``pairs`` the tensor-parallel sizes to try. ``alone`` is the engine for the
    reference: decode, unless it cannot compute a prompt.
    """

    build: Callable[[Path], str]
    tolerance: float = LOGPROB_TOLERANCE
    engine: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 1))
    alone: Literal["prefill", "decode"] = "decode"

    @property
    def runs_here(self) -> bool:
        """Whether vLLM's CPU attention has kernels for the family's cache on this machine."""
        try:
            _get_attn_isa(torch.bfloat16, 32, 32, self.engine.get("kv_cache_dtype"))
        except NotImplementedError:
            return False
        return True


# A bfloat16 cache computed by another number of ranks differs by rounding from one's own.
_BFLOAT16: dict[str, Any] = {"engine": {"dtype": "bfloat16"}, "tolerance": 0.3}
# vLLM's CPU attention stores FP8 on x86 with AVX-512 or AMX, and no INT8.
_FP8: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
_HALF, _WHOLE = {"block_size": 32}, {"block_size": 64}

FAMILIES: dict[str, Family] = {
    "llama": Family(llama, pairs=((1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (4, 4))),
    "gemma3": Family(gemma3),
    "gpt_oss": Family(gpt_oss),
    "llama4": Family(llama4),
    # The kernel that vLLM prefers on a CPU with AMX runs in bfloat16 only, and rounding would hide
    # wrong KV.
    "deepseek_v2": Family(deepseek_v2, engine={"attention_backend": "CPU_MLA"}),
    "falcon_h1": Family(falcon_h1),
    # With prefix caching, states have their own blocks, and vLLM's Mamba-2 kernels crash on the CPU
    # with any prompt.
    "falcon_h1_align_decode": Family(
        falcon_h1, decode={"enable_prefix_caching": True}, pairs=((1, 1),), alone="prefill"
    ),
    "falcon_h1_two_groups": Family(partial(falcon_h1, state_groups=2)),
    "qwen3_next": Family(qwen3_next, **_BFLOAT16),
    "llama_fp8": Family(llama, tolerance=0.3, engine=_FP8),
    "gemma3_fp8_blocks_32_to_64": Family(
        gemma3, tolerance=0.3, engine=_FP8, prefill=_HALF, decode=_WHOLE, pairs=((1, 2),)
    ),
    "gemma3_blocks_32_to_64": Family(gemma3, prefill=_HALF, decode=_WHOLE, pairs=((1, 1), (1, 2))),
    "gemma3_blocks_64_to_32": Family(gemma3, prefill=_WHOLE, decode=_HALF, pairs=((1, 1), (2, 1))),
}
IDENTITY = {"gemma3": Family(gemma3)}
RANKS = {
    "gemma3": Family(gemma3),
    "falcon_h1": Family(falcon_h1),
    "deepseek_v2": Family(partial(deepseek_v2, experts=0), engine=FAMILIES["deepseek_v2"].engine),
}


@dataclass(frozen=True)
class Result:
    """Result of one pair: ``moved`` of ``movable`` prompts received all their KV from prefill."""

    identity: Outcome
    moved: int
    movable: int
    clean: bool

    @property
    def good(self) -> bool:
        return not self.identity.wrong and self.moved == self.movable and self.clean


async def compare(
    family: Family,
    shape: Shape,
    model: str,
    cases: Sequence[Case],
    trace: Path,
    tokens: int = MAX_TOKENS,
    independent: bool = False,
    damage: float = 0.0,
) -> Result:
    """Send each case once through a pair.

    ``independent``  the reference is a stock engine instead of one of the two
    ``damage``       the stock engine has damaged weights
    """
    references = None
    if independent or damage:
        references = await stock(model, shape.tp[1], cases, tokens, damage, **(family.engine | family.decode))
    sides = (family.engine | family.prefill, family.engine | family.decode)
    async with engines(model, shape, trace, *sides) as pair:
        references = references or await alone(getattr(pair, family.alone), cases, tokens)
        at_once = 1 if shape.dp == (1, 1) else 4
        wrong, worst = await pair.send(cases, references, tokens, family.tolerance, at_once)
        clean = await pair.idle()
        moved, _ = pair.received()
    return Result(Outcome(len(cases), tuple(wrong), worst), moved, sum(case.movable for case in cases), clean)


async def run(
    family: Family, tp: tuple[int, int], model: str, count: int, trace: Path, tokens: int = MAX_TOKENS
) -> Result:
    """Send ``count`` prompts through a pair of these tensor-parallel sizes."""
    cases = [Case(prompt) for prompt in prompts(count, LONGEST, seed=7)]
    return await compare(family, Shape(tp), model, cases, trace, tokens)


def _all(
    report: Report,
    todo: Mapping[str, tuple[Family, Sequence[str]]],
    count: int,
    longest: int = LONGEST,
    independent: bool = False,
    damage: float = 0.0,
) -> None:
    fork_server.prepare()
    cases = [Case(prompt) for prompt in prompts(count, longest, seed=7)]
    for name, (family, shapes) in todo.items():
        model = family.build(report.folder / name)

        async def play(shape: Shape, trace: Path, family: Family = family, model: str = model) -> dict[str, Any]:
            result = await compare(family, shape, model, cases, trace, MAX_TOKENS, independent, damage)
            one = result.identity
            return {
                "of": one.checked,
                "wrong": one.wrong,
                "worst_logprob": f"{one.worst_logprob:.1e}",
                "moved": result.moved,
                "movable": result.movable,
                "clean": result.clean,
            }

        judge_each(report, name, shapes, play)


def identity(report: Report, *, count: int = 100, pairs: str = "1:1,1:2,2:1,2:2", damage: float = 0.0) -> None:
    """Prompts of up to 1,500 tokens, at every block and window boundary."""
    todo = {name: (family, pairs.split(",")) for name, family in IDENTITY.items()}
    _all(report, todo, count, 1500, independent=True, damage=damage)


def families(
    report: Report, *, count: int = 30, only: str = "", pairs: str = "", fewer: bool = False, damage: float = 0.0
) -> None:
    """``only``: a regular expression for names; ``fewer``: one pair of unequal sizes each."""
    todo = {}
    for name, family in FAMILIES.items():
        if re.search(only, name) and family.runs_here:
            own = [f"{p}:{d}" for p, d in family.pairs]
            todo[name] = (family, pairs.split(",") if pairs else own[1:2] or own if fewer else own)
    _all(report, todo, count, damage=damage)


def ranks(
    report: Report,
    *,
    count: int = 100,
    only: str = "",
    pairs: str = "2x1:1x1,1x1:2x1,2x1:2x1,2x1:1x2",
    damage: float = 0.0,
) -> None:
    """Requests are pinned to ranks, so all pairs of data-parallel ranks exchange KV."""
    todo = {name: (family, pairs.split(",")) for name, family in RANKS.items() if re.search(only, name)}
    _all(report, todo, count, independent=True, damage=damage)
