"""Loads to replay: arrivals with their lengths, synthetic from a seed or from a file."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

HOUR_S = 3600.0


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Load:
    """A load; `arrivals` in order of time, over `duration_s`."""

    name: str
    about: str
    duration_s: float
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True)
class Mix:
    """Mean lengths in tokens of lognormal distributions."""

    prompt_tokens: float
    answer_tokens: float
    sigma: float = 0.7


CHAT = Mix(1500, 200)
READING = Mix(8000, 50, sigma=0.4)
WRITING = Mix(300, 800, sigma=0.4)


def synthetic(seed: int) -> list[Load]:
    """Return the four loads of the documentation: Poisson arrivals whose rate changes."""
    return [
        _make("ramp", "chat, from 1 to 20 requests/s and back", seed, _ramp, lambda _: CHAT),
        _make("bursts", "chat, 4 requests/s, and 12 for five minutes of every fifteen", seed, _bursts, lambda _: CHAT),
        _make("shift", "long prompts at 4 requests/s for half an hour, then long answers", seed, lambda _: 4.0, _shift),
        _make("day", "a day in an hour: two peaks of 15 requests/s, lengths of both kinds", seed, _day, _any),
    ]


def from_file(path: Path) -> Load:
    """Read CSV with Azure's columns TIMESTAMP (ISO 8601), ContextTokens and GeneratedTokens."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    began = _timestamp(rows[0]["TIMESTAMP"])
    arrivals = []
    for row in rows:
        lengths = (max(int(row[name]), 1) for name in ("ContextTokens", "GeneratedTokens"))
        arrivals.append(Arrival((_timestamp(row["TIMESTAMP"]) - began).total_seconds(), *lengths))
    return Load(path.stem, f"recorded, 100% of {len(rows)} requests", arrivals[-1].at_s, tuple(arrivals))


def _timestamp(text: str) -> datetime:
    # Python's parser accepts six digits of a second, not seven.
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}")


def _ramp(at_s: float) -> float:
    up, down = at_s / 1200, (HOUR_S - at_s) / 1200
    return 1 + 19 * min(up, down, 1.0)


def _bursts(at_s: float) -> float:
    return 12.0 if 300 <= at_s % 900 < 600 else 4.0


def _day(at_s: float) -> float:
    phase = 2 * np.pi * at_s / HOUR_S
    return float(8 - 5 * np.cos(phase) - 3 * np.cos(2 * phase)) * 15 / 14.1


def _shift(at_s: float) -> Mix:
    return READING if at_s < HOUR_S / 2 else WRITING


def _any(at_s: float) -> Mix:
    # Both kinds alternate by seconds, so that both occur at any time.
    return READING if int(at_s * 10) % 10 == 0 else CHAT if int(at_s * 10) % 10 < 8 else WRITING


def _make(name: str, about: str, seed: int, rate: Callable[[float], float], mix: Callable[[float], Mix]) -> Load:
    # Thinning: candidates at the highest rate, each kept with the probability of its time's rate.
    random, most, at_s = np.random.default_rng([seed, *name.encode()]), 25.0, 0.0
    arrivals = []
    while (at_s := at_s + random.exponential(1 / most)) < HOUR_S:
        if random.random() * most < rate(at_s):
            kind = mix(at_s)
            lengths = [
                max(1, int(random.lognormal(np.log(mean) - kind.sigma**2 / 2, kind.sigma)))
                for mean in (kind.prompt_tokens, kind.answer_tokens)
            ]
            arrivals.append(Arrival(at_s, *lengths))
    return Load(name, about, HOUR_S, tuple(arrivals))
