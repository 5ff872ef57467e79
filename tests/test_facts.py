"""The demo model's prompt generator and tokenizer; no engine and no weights are loaded."""

from random import Random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.demo.paths import MODEL_DIR
from testing.facts import (
    FACT_TOKENS,
    NAMES,
    SEPARATORS,
    VALUE_DIGITS,
    accuracy,
    distance_tokens,
    exact,
    fact_count_for,
    make_prompt,
    prompt_tokens,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)


def test_names_are_distinct_words() -> None:
    assert len(set(NAMES)) == len(NAMES) == 256
    assert all(name.isalpha() and name.islower() for name in NAMES)


@pytest.mark.parametrize("fact_count", [1, 2, 17, 140, len(NAMES)])
def test_facts_have_distinct_names_and_full_values(fact_count: int) -> None:
    prompt = make_prompt(Random(1), fact_count)
    assert len({fact.name for fact in prompt.facts}) == fact_count
    assert all(len(fact.value) == VALUE_DIGITS and fact.value.isdigit() for fact in prompt.facts)


@pytest.mark.parametrize("separator", SEPARATORS)
def test_answer_stands_in_the_prompt_once(separator: str) -> None:
    prompt = make_prompt(Random(2), 60, separator=separator)
    assert prompt.text.count(f"{prompt.question_name}={prompt.answer}{separator}") == 1
    assert prompt.text.endswith(f"{separator}{prompt.question_name}?")
    assert prompt.messages == [{"role": "user", "content": prompt.text}]


def test_same_seed_same_prompt_and_another_seed_another() -> None:
    assert make_prompt(Random(3), 20) == make_prompt(Random(3), 20)
    assert make_prompt(Random(3), 20) != make_prompt(Random(4), 20)


@pytest.mark.parametrize("distance", [0, 1, 38, 39])
def test_distance_is_honoured(distance: int) -> None:
    prompt = make_prompt(Random(5), 40, distance_facts=distance)
    assert prompt.distance_facts == distance
    facts_after = prompt.facts_text.split(f"{prompt.question_name}=")[1].count("=")
    assert facts_after == distance


def test_drawn_distances_cover_the_prompt() -> None:
    rng = Random(6)
    assert {make_prompt(rng, 3).distance_facts for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize(("fact_count", "distance"), [(0, None), (257, None), (5, 5), (5, -1)])
def test_impossible_prompts_are_refused(fact_count: int, distance: int | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_prompt(Random(7), fact_count, distance)


def test_fact_count_is_the_most_that_fits() -> None:
    for tokens in range(prompt_tokens(1), 1001):
        count = fact_count_for(tokens)
        assert prompt_tokens(count) <= tokens < prompt_tokens(count + 1)


def test_exact_takes_the_answer_alone() -> None:
    prompt = make_prompt(Random(8), 4)
    assert exact(prompt, f" {prompt.answer}\n")
    assert exact(prompt, str(prompt.facts[prompt.asked]))
    assert not exact(prompt, prompt.answer[:-1])
    assert not exact(prompt, f"x={prompt.answer}")
    assert not exact(prompt, f"{prompt.answer}0")


def test_accuracy_is_the_share_of_right_answers() -> None:
    assert accuracy([True, False, True, True]) == 0.75
    assert accuracy([]) == 0.0


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


def test_chat_prompt_has_one_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = make_prompt(Random(11), 3)
    ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == prompt_tokens(3) + 3
