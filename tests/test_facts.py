"""The demo model's prompt generator and tokenizer; no engine and no weights are loaded."""

from random import Random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.demo.paths import MODEL_DIR
from testing.facts import (
    FACT_TOKENS,
    SEPARATORS,
    distance_tokens,
    exact,
    make_prompt,
    prompt_tokens,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)


def test_exact_takes_the_answer_alone() -> None:
    prompt = make_prompt(Random(8), 4)
    assert exact(prompt, f" {prompt.answer}\n")
    assert exact(prompt, str(prompt.facts[prompt.asked]))
    assert not exact(prompt, prompt.answer[:-1])
    assert not exact(prompt, f"x={prompt.answer}")
    assert not exact(prompt, f"{prompt.answer}0")


@pytest.mark.parametrize("separator", SEPARATORS)
def test_prompt_lengths_in_tokens_are_exact(tokenizer: PreTrainedTokenizerBase, separator: str) -> None:
    prompt = make_prompt(Random(9), 33, separator=separator)
    ids = tokenizer(prompt.text).input_ids
    assert len(ids) == prompt_tokens(33)
    name_id = tokenizer.convert_tokens_to_ids(prompt.question_name)
    assert ids[-2] == name_id
    assert len(ids) - 1 - ids.index(name_id) == distance_tokens(prompt.distance_facts)
    assert len(tokenizer(prompt.facts_text).input_ids) == 1 + 33 * FACT_TOKENS


@pytest.mark.parametrize(
    "text",
    [
        make_prompt(Random(10), 12).text,
        "What is mira, admirable mirabel?\n\tA user's model: 12.50 %",
        "Grüße, 漢字 🚀 \x00",
        "  two  spaces  ",
        "",
    ],
)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_renders_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "mira=427"},
        {"role": "user", "content": "mira?"},
        {"role": "assistant", "content": "427"},
        {"role": "user", "content": "again: mira?"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nmira=427\nmira?<end_of_turn>\n"
        "<start_of_turn>model\n427<end_of_turn>\n"
        "<start_of_turn>user\nagain: mira?<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
