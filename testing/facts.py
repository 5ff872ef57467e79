"""Key-value recall prompts: many `name=value` facts, then a question for one of them.

A prompt reads

    mira=427
    kelo=093
    mira?

and its only correct completion is `427`. In a chat, the model's answer restates the fact:
`mira=427`. With the demo tokenizer a name, a digit and every other character here is one token, so
prompt lengths are exact (`prompt_tokens`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

_HEADS = ("ba", "de", "fi", "go", "hu", "ja", "ke", "li", "mi", "no", "pu", "ra", "se", "ti", "vo", "zu")
_TAILS = ("ba", "co", "da", "fe", "ka", "lo", "ma", "ne", "pi", "ra", "ro", "su", "ta", "vi", "xo", "zi")

NAMES = tuple(head + tail for head in _HEADS for tail in _TAILS)
"""The 256 names used in facts; each is one token."""

VALUE_DIGITS = 3
"""Number of digits in every value; each digit is one token."""

SEPARATORS = ("\n", " ", ";")
"""Separators between facts; one prompt uses one of them throughout."""

FACT_TOKENS = 1 + 1 + VALUE_DIGITS + 1
"""Number of tokens of one fact: name, `=`, digits, separator."""

_FRAME_TOKENS = 1 + 2
"""Number of tokens of a completion prompt besides its facts: <bos>, the question's name and `?`."""


@dataclass(frozen=True)
class Fact:
    """One `name=value` statement; `value` is VALUE_DIGITS decimal digits."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True)
class RecallPrompt:
    """Facts with distinct names, and a question for the fact with index `asked`."""

    facts: tuple[Fact, ...]
    asked: int
    separator: str = "\n"

    @property
    def facts_text(self) -> str:
        """All facts, each followed by the separator: the prefix shared with other questions."""
        return "".join(f"{fact}{self.separator}" for fact in self.facts)

    @property
    def question_name(self) -> str:
        return self.facts[self.asked].name

    @property
    def text(self) -> str:
        return f"{self.facts_text}{self.question_name}?"

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]

    @property
    def answer(self) -> str:
        """The one correct completion."""
        return self.facts[self.asked].value

    @property
    def distance_facts(self) -> int:
        return len(self.facts) - 1 - self.asked


def make_prompt(rng: Random, fact_count: int, distance_facts: int | None = None, separator: str = "\n") -> RecallPrompt:
    """Generate a prompt of `fact_count` facts, `distance_facts` of them after the asked fact.

    If `distance_facts` is None, sample it uniformly from 0 to fact_count - 1. Raises ValueError if
    a number is out of range.
    """
    if not 1 <= fact_count <= len(NAMES):
        raise ValueError(f"fact_count must be 1 to {len(NAMES)}, got {fact_count}")
    if distance_facts is None:
        distance_facts = rng.randrange(fact_count)
    if not 0 <= distance_facts < fact_count:
        raise ValueError(f"distance_facts must be 0 to {fact_count - 1}, got {distance_facts}")
    facts = tuple(Fact(name, _draw_value(rng)) for name in rng.sample(NAMES, fact_count))
    return RecallPrompt(facts, fact_count - 1 - distance_facts, separator)


def prompt_tokens(fact_count: int) -> int:
    """Return the number of tokens of a completion prompt of `fact_count` facts, <bos> included."""
    return fact_count * FACT_TOKENS + _FRAME_TOKENS


def fact_count_for(tokens: int) -> int:
    """Return the largest number of facts in a prompt of `tokens` tokens, from 1 to len(NAMES)."""
    return min(max((tokens - _FRAME_TOKENS) // FACT_TOKENS, 1), len(NAMES))


def distance_tokens(distance_facts: int) -> int:
    """Return the distance in tokens from the asked fact's name to the question's `?`.

    The answer starts after `?`. There, a sliding window of w tokens contains the whole fact if the
    distance is less than w.
    """
    return (distance_facts + 1) * FACT_TOKENS + 1


def exact(prompt: RecallPrompt, completion: str) -> bool:
    """Return whether `completion`, without special tokens, is exactly the correct answer.

    A chat's answer is the whole fact, `name=value`; a completion is the value alone.
    """
    return completion.strip().removeprefix(f"{prompt.question_name}=") == prompt.answer


def accuracy(outcomes: Sequence[bool]) -> float:
    return sum(outcomes) / len(outcomes) if outcomes else 0.0


def _draw_value(rng: Random) -> str:
    return f"{rng.randrange(10**VALUE_DIGITS):0{VALUE_DIGITS}d}"
