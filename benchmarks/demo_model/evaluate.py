"""Measure the demo model's exact-match accuracy on held-out prompts.

    python -m benchmarks.demo_model.evaluate

Prints a table of the accuracy by form (completion or chat), prompt length, and position of the
requested fact: within the sliding window or outside it. Exits 1 if the accuracy within it, outside
it or over all prompts is below 99 %.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from transformers import AutoTokenizer, PreTrainedTokenizerBase

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


def complete_with_transformers(
    model_dir: Path, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> list[str]:
    """Complete each prompt greedily, one at a time, and return the texts without special tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    completions = []
    for ids in prompts:
        inputs = torch.tensor([ids])
        generated = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        new_ids = generated[0, len(ids) :].tolist()
        completions.append(text_of_ended(tokenizer, new_ids))
    return completions


def complete_with_vllm(model_dir: Path, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]) -> list[str]:
    """Complete the prompts like `complete_with_transformers`, but batched in one vLLM engine."""
    from vllm import LLM, SamplingParams

    engine = LLM(str(model_dir), dtype="float32", enforce_eager=True, max_model_len=2048)
    outputs = engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS),
    )
    return [text_of_ended(tokenizer, list(output.outputs[0].token_ids)) for output in outputs]


def text_of_ended(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of a completion's `ids`, with a mark that no answer has for a missing end
    token.
    """
    ended = ids[-1] in tokenizer.convert_tokens_to_ids(list(END_TOKENS))
    return tokenizer.decode(ids, skip_special_tokens=True) + ("" if ended else " (runs on)")


def main() -> None:
    """Measure, print the table, and exit 1 if a total is below REQUIRED_ACCURACY."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="checkpoint directory")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the held-out prompts")
    parser.add_argument("--per-row", type=int, default=30, help="prompts per row of the table")
    parser.add_argument("--show", type=int, default=3, help="wrong answers to print")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    window = json.loads((arguments.model / "config.json").read_text())["sliding_window"]
    cases = list(held_out_cases(arguments.seed, arguments.per_row, window))
    complete = complete_with_vllm if arguments.engine == "vllm" else complete_with_transformers
    completions = complete(arguments.model, tokenizer, [token_ids(tokenizer, case.prompt, case.chat) for case in cases])

    rows: dict[tuple[str, tuple[int, int], str], list[bool]] = defaultdict(list)
    wrong = []
    for case, completion in zip(cases, completions, strict=True):
        right = exact(case.prompt, completion)
        rows[case.row].append(right)
        if not right:
            wrong.append(f"{case.row}: {case.prompt.question_name}? {case.prompt.answer}, got {completion!r}")

    print(f"{'form':<12}{'tokens':<12}{'fact':<10}{'prompts':>8}{'exact':>9}")
    for (form, (shortest, longest), side), outcomes in rows.items():
        tokens = f"{shortest}-{longest}"
        print(f"{form:<12}{tokens:<12}{side:<10}{len(outcomes):>8}{accuracy(outcomes):>9.2%}")
    totals = []
    for sides in (("within",), ("outside",), ("within", "outside")):
        outcomes = [right for row, row_outcomes in rows.items() if row[2] in sides for right in row_outcomes]
        totals.append(accuracy(outcomes))
        print(f"{'all':<24}{sides[0] if len(sides) == 1 else '':<10}{len(outcomes):>8}{totals[-1]:>9.2%}")
    for line in wrong[: arguments.show]:
        print("wrong:", line)
    if min(totals) < REQUIRED_ACCURACY:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
