"""Measure the demo model's exact-match accuracy on held-out prompts.

Prints the accuracy by form (completion or chat), prompt length, and position of the
requested fact: within the sliding window or outside it. Exits 1 if the accuracy within it, outside
it or over all prompts is below 99 %.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from app.demo.paths import MODEL_DIR
from testing.facts import (
    FACT_TOKENS,
    SEPARATORS,
    VALUE_DIGITS,
    RecallPrompt,
    accuracy,
    distance_tokens,
    exact,
    fact_count_for,
    make_prompt,
)

REQUIRED_ACCURACY = 0.99

LENGTHS = ((20, 128), (129, 256), (257, 512), (513, 768), (769, 1000))
"""Prompt lengths in tokens: the shortest and longest of each bucket, both included."""

CHAT_TOKENS_BEFORE, CHAT_TOKENS_AFTER = 1, 2
"""Tokens of the chat template between <bos> and the message, and after the message."""

MAX_NEW_TOKENS = 2 + VALUE_DIGITS + 1
"""Room for `name=value` and the end token, without which a completion is wrong."""

END_TOKENS = ("<eos>", "<end_of_turn>\n")
"""End tokens of a completion and of a chat's reply."""


@dataclass(frozen=True)
class Case:
    """One prompt to measure, and the table row in which it counts."""

    prompt: RecallPrompt
    chat: bool
    within_window: bool
    """Whether the whole fact is inside the sliding window when the first digit is computed."""
    bucket: tuple[int, int]

    @property
    def row(self) -> tuple[str, tuple[int, int], str]:
        return (
            "chat" if self.chat else "completion",
            self.bucket,
            "within" if self.within_window else "outside",
        )


def token_ids(tokenizer: PreTrainedTokenizerBase, prompt: RecallPrompt, chat: bool) -> list[int]:
    """Return the prompt as the model's input, with <bos>."""
    if chat:
        return tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    return tokenizer(prompt.text).input_ids


def held_out_cases(seed: int, per_row: int, window: int) -> Iterator[Case]:
    """Draw `per_row` cases for every row; `window` is the sliding window in tokens.

    Training seeds its generator with `train N`, this function with `held out N`, so their facts are
    independent. No case asks for a fact across the window's edge. If a prompt is too short for a
    fact outside the window, the case counts as one within.
    """
    rng = Random(f"held out {seed}")
    for chat in (False, True):
        before, after = (CHAT_TOKENS_BEFORE, CHAT_TOKENS_AFTER) if chat else (0, 0)
        for bucket in LENGTHS:
            for index in range(2 * per_row):
                fact_count = fact_count_for(rng.randint(*bucket) - before - after)
                reach = [distance_tokens(distance) + after for distance in range(fact_count)]
                within = [distance for distance in range(fact_count) if reach[distance] < window]
                outside = [d for d in range(fact_count) if reach[d] - (FACT_TOKENS - 1) >= window]
                is_within = index % 2 == 0 or not outside
                distance = rng.choice(within if is_within else outside)
                prompt = make_prompt(rng, fact_count, distance, rng.choice(SEPARATORS))
                yield Case(prompt, chat, is_within, bucket)


def text_of_ended(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of a completion's `ids`, with a mark that no answer has for a missing end
    token.
    """
    ended = ids[-1] in tokenizer.convert_tokens_to_ids(list(END_TOKENS))
    return tokenizer.decode(ids, skip_special_tokens=True) + ("" if ended else " (runs on)")


def main(*, model: str = str(MODEL_DIR), seed: int = 0, per_row: int = 30) -> int:
    """Measure ``per_row`` prompts of each row, and print the table."""
    tokenizer, weights = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    rows: dict[tuple[str, tuple[int, int], str], list[bool]] = defaultdict(list)
    for case in held_out_cases(seed, per_row, weights.config.sliding_window):
        inputs = torch.tensor([token_ids(tokenizer, case.prompt, case.chat)])
        mask = torch.ones_like(inputs)
        generated = weights.generate(inputs, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        completion = text_of_ended(tokenizer, generated[0, inputs.shape[1] :].tolist())
        rows[case.row].append(exact(case.prompt, completion))
        if not rows[case.row][-1]:
            print(f"wrong: {case.row}: {case.prompt.question_name}? {case.prompt.answer}, got {completion!r}")

    print(f"{'form':<12}{'tokens':<12}{'fact':<10}{'prompts':>8}{'exact':>9}")
    for (form, (shortest, longest), side), outcomes in rows.items():
        tokens = f"{shortest}-{longest}"
        print(f"{form:<12}{tokens:<12}{side:<10}{len(outcomes):>8}{accuracy(outcomes):>9.2%}")
    totals = []
    for sides in (("within",), ("outside",), ("within", "outside")):
        outcomes = [right for row, row_outcomes in rows.items() if row[2] in sides for right in row_outcomes]
        totals.append(accuracy(outcomes))
        print(f"{'all':<24}{sides[0] if len(sides) == 1 else '':<10}{len(outcomes):>8}{totals[-1]:>9.2%}")
    return int(min(totals) < REQUIRED_ACCURACY)
