"""Measure whether damaged KV causes wrong answers.

Computes every prompt without its last token. Then it zeroes the cached KV of one group of layers,
or replaces it with that of another prompt of the same length, and computes the last token and the
answer. The groups are those that vLLM makes; each has its own blocks, so a faulty transfer can lose
or mix up the blocks of one group. Prints the share of right answers by group, damage and form of
the prompt. Exits 1 if a share of completions is above 25 %. Chats have no limit: see
app/demo/README.md.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from app.demo.paths import MODEL_DIR
from benchmarks.demo_model.evaluate import (
    CHAT_TOKENS_AFTER,
    CHAT_TOKENS_BEFORE,
    END_TOKENS,
    MAX_NEW_TOKENS,
    text_of_ended,
    token_ids,
)
from testing.facts import SEPARATORS, RecallPrompt, accuracy, exact, fact_count_for, make_prompt

FULL, SLIDING = "full_attention", "sliding_attention"

MOST_RIGHT = 0.25
"""Highest acceptable share of right completions on damaged KV; above it, such damage would often
go undetected.
"""

LENGTHS = (300, 375, 450, 525, 600)
"""Prompt lengths in tokens; a prompt is up to 5 tokens shorter, because it has whole facts only."""


class Fault(StrEnum):
    ZEROED = "zeroed"
    OTHER = "other prompt's"
    """Keys and values of the previous sequence in the batch."""


def kv_groups(layer_types: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each KV cache group that vLLM makes, the group of full layers last.

    Every group has as many layers as there are full ones; vLLM distributes the sliding layers in
    turn.
    """
    full = tuple(index for index, kind in enumerate(layer_types) if kind == FULL)
    sliding = tuple(index for index, kind in enumerate(layer_types) if kind == SLIDING)
    count = len(sliding) // len(full)
    return (*(sliding[first::count] for first in range(count)), full)


def damaged(states: torch.Tensor, fault: Fault, last: int | None = None) -> torch.Tensor:
    """Return cached keys or values [sequences, heads, tokens, width] with all or the `last`
    tokens damaged.
    """
    intact = 0 if last is None else max(states.shape[2] - last, 0)
    kept, part = states[:, :, :intact], states[:, :, intact:]
    return torch.cat([kept, torch.zeros_like(part) if fault is Fault.ZEROED else part.roll(1, dims=0)], dim=2)


@dataclass(frozen=True)
class Damage:
    layers: tuple[int, ...]
    fault: Fault


def draw_batch(rng: Random, length: int, chat: bool, prompts: int) -> list[RecallPrompt]:
    """Draw prompts of one form and of `length` tokens that ask for distinct names."""
    frame = CHAT_TOKENS_BEFORE + CHAT_TOKENS_AFTER if chat else 0
    batch: dict[str, RecallPrompt] = {}
    while len(batch) < prompts:
        prompt = make_prompt(rng, fact_count_for(length - frame), separator=rng.choice(SEPARATORS))
        batch[prompt.question_name] = prompt
    return list(batch.values())


def damaged_copy(cache: DynamicCache, damage: Damage | None) -> DynamicCache:
    """Return a copy of `cache` for generation, with `damage` applied."""
    result = copy.deepcopy(cache)
    if damage is not None:
        for index in damage.layers:
            layer = result.layers[index]
            layer.keys, layer.values = damaged(layer.keys, damage.fault), damaged(layer.values, damage.fault)
    return result


def answer(model: PreTrainedModel, last_tokens: torch.Tensor, cache: DynamicCache) -> list[list[int]]:
    """Continue greedily after `cache`, from the last prompt token of each sequence, [sequences,
    1].
    """
    tokens = [last_tokens]
    for _ in range(MAX_NEW_TOKENS):
        logits = model(input_ids=tokens[-1], past_key_values=cache).logits
        tokens.append(logits[:, -1:].argmax(-1))
    return torch.cat(tokens[1:], dim=1).tolist()


@torch.inference_mode()
def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int, per_length: int
) -> dict[tuple[Damage | None, bool], list[bool]]:
    """Return whether each answer was right, by damage (None for intact KV) and whether it was a
    chat.
    """
    groups = kv_groups(model.config.layer_types)
    damages = [None, *(Damage(layers, fault) for layers in groups for fault in Fault)]
    ends = set(tokenizer.convert_tokens_to_ids(list(END_TOKENS)))
    rng = Random(f"sensitivity {seed}")
    outcomes: dict[tuple[Damage | None, bool], list[bool]] = defaultdict(list)
    for chat in (False, True):
        for length in LENGTHS:
            prompts = draw_batch(rng, length, chat, per_length)
            ids = torch.tensor([token_ids(tokenizer, prompt, chat) for prompt in prompts])
            cache = DynamicCache(config=model.config)
            model(input_ids=ids[:, :-1], past_key_values=cache, logits_to_keep=1)
            for damage in damages:
                answers = answer(model, ids[:, -1:], damaged_copy(cache, damage))
                for prompt, new_ids in zip(prompts, answers, strict=True):
                    until_end = next((n for n, token in enumerate(new_ids, 1) if token in ends), len(new_ids))
                    text = text_of_ended(tokenizer, new_ids[:until_end])
                    outcomes[damage, chat].append(exact(prompt, text))
    return outcomes


def main(*, model: str = str(MODEL_DIR), seed: int = 0, per_length: int = 20) -> int:
    """Measure ``per_length`` prompts per form and length, and print the table."""
    outcomes = measure(
        AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model), seed, per_length
    )
    print(f"{'layers':<12}{'cached KV':<18}{'completion':>11}{'chat':>8}   (right answers)")
    for damage in dict.fromkeys(damage for damage, _ in outcomes):
        layers = ", ".join(map(str, damage.layers)) if damage else "none"
        completion, chat = accuracy(outcomes[damage, False]), accuracy(outcomes[damage, True])
        print(f"{layers:<12}{damage.fault if damage else 'intact':<18}{completion:>11.1%}{chat:>8.1%}")
    shares = [accuracy(rights) for (damage, chat), rights in outcomes.items() if damage and not chat]
    return int(max(shares) > MOST_RIGHT)
