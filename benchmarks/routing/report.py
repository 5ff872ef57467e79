"""Statistics of a replay, and the tables of build/routing.md."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.routing.fleet import Outcome

OURS = "cost"
ORACLE = "oracle"
THRESHOLDS = (128, 512, 2048)

Measured = dict[str, float]
"""Statistics of one replay or, averaged, of several."""


def measure(outcomes: Sequence[Outcome]) -> Measured:
    """Times in milliseconds; TPOT is the mean of each request; `finish_ms` is the mean time to
    the last token.
    """
    ttft = [one.ttft_s for one in outcomes]
    tpot = [one.decode_s / (one.answer_tokens - 1) for one in outcomes if one.answer_tokens > 1]
    finish = [one.ttft_s + one.decode_s for one in outcomes]
    return {
        "ttft_ms": 1e3 * statistics.fmean(ttft),
        "ttft_p99_ms": 1e3 * _p99(ttft),
        "tpot_ms": 1e3 * statistics.fmean(tpot),
        "tpot_p99_ms": 1e3 * _p99(tpot),
        "finish_ms": 1e3 * statistics.fmean(finish),
        "cached_share": 1 - sum(one.computed_tokens for one in outcomes) / sum(one.prompt_tokens for one in outcomes),
        "remote_share": statistics.fmean(one.remote for one in outcomes),
    }


def average(runs: Iterable[Measured]) -> Measured:
    """Return the mean of each measurement over all runs, one per seed."""
    several = list(runs)
    return {name: statistics.fmean(run[name] for run in several) for name in several[0]}


def regrets(runs: Sequence[dict[str, Measured]], ours: str, oracle: str, number: str) -> dict[str, float]:
    """Return the excess of `number` over the oracle's: of the means over seeds, and the seeds'
    range.
    """
    each = [run[ours][number] / run[oracle][number] - 1 for run in runs]
    mine, best = (statistics.fmean(run[arm][number] for run in runs) for arm in (ours, oracle))
    return {"mean": mine / best - 1, "least": min(each), "most": max(each)}


def tables(document: dict[str, Any]) -> str:
    """Return the Markdown tables of all measurements."""
    parts = [_policies(load) for load in document["loads"]]
    return "\n".join([_regrets(document), _prefixes(document), _first_tokens(document), *parts])


def _regrets(document: dict[str, Any]) -> str:
    lines = [
        "### Regret against the oracle\n",
        "Regret in the mean time to the last token, which the oracle minimizes, with the range over seeds;",
        "in mean TTFT and TPOT, which may be negative; and that of the best fixed threshold on this load.\n",
        "| load | last token | seeds | TTFT | TPOT | best threshold's last token |",
        "|---|---|---|---|---|---|",
    ]
    for load in document["loads"]:
        runs = load["seeds"]
        finish = regrets(runs, OURS, ORACLE, "finish_ms")
        ttft, tpot = (regrets(runs, OURS, ORACLE, name)["mean"] for name in ("ttft_ms", "tpot_ms"))
        fixed = min(regrets(runs, threshold(tokens), ORACLE, "finish_ms")["mean"] for tokens in THRESHOLDS)
        lines.append(
            f"| {load['name']} | {finish['mean']:+.1%} | {finish['least']:+.1%} … {finish['most']:+.1%} "
            f"| {ttft:+.1%} | {tpot:+.1%} | {fixed:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def _prefixes(document: dict[str, Any]) -> str:
    lines = [
        "### Cached prefixes\n",
        "Share of prompt tokens found in a cache or a KV store, and mean TTFT. `cost, no prefixes` ignores",
        "prefixes. `cost, stores unknown` knows prefix caches, but no KV stores.\n",
        "| load | policy | cached | TTFT (ms) | over round robin |",
        "|---|---|---|---|---|",
    ]
    for load in document["loads"]:
        mean = {arm: average(run[arm] for run in load["seeds"]) for arm in load["seeds"][0]}
        blind = BLIND if BLIND in mean else STORES_UNKNOWN
        if blind not in mean:
            continue
        for arm in (OURS, blind, "round robin", ORACLE):
            ttft_ms, cached = mean[arm]["ttft_ms"], mean[arm]["cached_share"]
            ratio = ttft_ms / mean["round robin"]["ttft_ms"]
            lines.append(f"| {load['name']} | {arm} | {cached:.0%} | {ttft_ms:.0f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def _first_tokens(document: dict[str, Any]) -> str:
    lines = [
        "### TTFT alone\n",
        "Both weights 0, against an oracle that minimizes TTFT (seed 1).\n",
        "| load | TTFT (ms) | oracle's TTFT (ms) | regret |",
        "|---|---|---|---|",
    ]
    for load in document["loads"]:
        mine, best = (load["first_tokens"][arm]["ttft_ms"] for arm in (OURS, ORACLE))
        lines.append(f"| {load['name']} | {mine:.0f} | {best:.0f} | {mine / best - 1:+.1%} |")
    return "\n".join(lines) + "\n"


def _policies(load: dict[str, Any]) -> str:
    lines = [
        f"### {load['name'][0].upper()}{load['name'][1:]}\n",
        textwrap.fill(f"{' '.join(load['description'].split())} {load['requests']} requests, {load['fleet']}.", 100)
        + "\n",
        "| policy | TTFT (ms) | p99 | TPOT (ms) | p99 | last token (ms) | cached | remote |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in load["seeds"][0]:
        one = average(run[arm] for run in load["seeds"])
        lines.append(
            f"| {arm} | {one['ttft_ms']:.1f} | {one['ttft_p99_ms']:.0f} "
            f"| {one['tpot_ms']:.2f} | {one['tpot_p99_ms']:.2f} "
            f"| {one['finish_ms']:.0f} | {one['cached_share']:.0%} | {one['remote_share']:.0%} |"
        )
    return "\n".join(lines) + "\n"


BLIND = "cost, no prefixes"
STORES_UNKNOWN = "cost, stores unknown"


def threshold(tokens: int) -> str:
    """Return the name of a fixed threshold's arm."""
    return f"threshold {tokens}"


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
