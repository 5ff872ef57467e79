"""Measure the load of an engine from its finished work. Reads no clock: callers pass the time."""

from dataclasses import dataclass
from math import exp

WINDOW_S = 15.0


@dataclass
class Fading:
    """Decaying sum: an amount added `age_s` ago has the weight exp(-age_s / window_s)."""

    window_s: float
    total: float = 0.0
    at_s: float = 0.0

    def add(self, amount: float, now_s: float) -> None:
        self.total = self.value(now_s) + amount
        self.at_s = max(self.at_s, now_s)

    def value(self, now_s: float) -> float:
        return self.total * exp(-max(now_s - self.at_s, 0.0) / self.window_s)


class LoadMeter:
    """Load of one engine, in exponential means."""

    def __init__(self, began_s: float, window_s: float = WINDOW_S) -> None:
        self._began_s = began_s
        self._window_s = window_s
        self._prompt_tokens = Fading(window_s)
        self._token_gaps_s = Fading(window_s)
        self._tokens = Fading(window_s)
        # This clock stops while no prompt is computed, so an idle engine keeps its last means.
        self._busy_clock_s = 0.0
        self._busy_until_s = began_s
        self._tokens_while_busy = Fading(window_s)
        self._busy_s = Fading(window_s)
        self._prompts = Fading(window_s)

    def prompt(self, tokens: int, computing_s: float, now_s: float) -> None:
        """Count a prompt of `tokens` tokens, computed from `now_s - computing_s` to `now_s`."""
        self._prompt_tokens.add(tokens, now_s)
        # Prompts are computed concurrently: overlapping time counts once.
        busy_s = max(now_s - max(now_s - computing_s, self._busy_until_s), 0.0)
        self._busy_until_s = max(now_s, self._busy_until_s)
        self._busy_clock_s += busy_s
        self._tokens_while_busy.add(tokens, self._busy_clock_s)
        self._prompts.add(1, self._busy_clock_s)
        self._busy_s.add(busy_s, self._busy_clock_s)

    def tokens(self, gap_s: float, now_s: float, count: float = 1) -> None:
        """Count a new token of each of `count` sequences, `gap_s` after its previous token."""
        self._token_gaps_s.add(gap_s * count, now_s)
        self._tokens.add(count, now_s)

    def read(self, now_s: float) -> dict[str, float]:
        """Return the fields of PrefillLoad and DecodeLoad measured so far, by name."""
        # Until the engine is older than the window, the sums cover less time than `_window_s`.
        window_s = self._window_s * (1 - exp(-max(now_s - self._began_s, 1e-3) / self._window_s))
        busy_s, prompts = self._busy_s.value(self._busy_clock_s), self._prompts.value(self._busy_clock_s)
        while_busy = self._tokens_while_busy.value(self._busy_clock_s)
        tokens, gaps_s = self._tokens.value(now_s), self._token_gaps_s.value(now_s)
        load = {"tokens_per_s": self._prompt_tokens.value(now_s) / window_s, "decoding": gaps_s / window_s}
        if busy_s > 0:
            load |= {"tokens_per_busy_s": while_busy / busy_s, "prompt_tokens": while_busy / prompts}
        if tokens > 0:
            load["tpot_s"] = gaps_s / tokens
        return load
