"""Write a page of campaign results: ``python -m tests.campaigns.faults.report RESULTS PAGE``.

A person's interpretation at the end of an existing page stays, in place of the details.
"""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from testing.servers import POOL_BLOCKS
from tests.campaigns.faults.judge import AT_ONCE_S
from tests.campaigns.faults.presets import PRESETS
from tests.campaigns.faults.trials import ANSWER_TOKENS

INTERPRETATION = "## Interpretation\n"
OUTCOMES = ("right", "refused", "cancelled", "wrong", "hang")
HEAD = """# {title} under faults

<!-- Written by `python -m tests.campaigns.faults.report` from `{source}`; do not edit by hand. -->

A seeded campaign injects faults into stock vLLM servers on vLLM's **CPU** build: one prefill and
one decode engine with one model (`app/demo/model`, whose answers show wrong KV) and one connector,
without a router that hides failures. Requests are sent several at a time, as a sequential proxy
does; with Tandem, half of them go to both engines at once.

Command: `make faults`. Machine: two x86-64 cores, no GPU. It shows how a connector ends work in
progress when something fails. It does not show speed, GPUs or RDMA.

*Right* is the text of an engine without a connector (greedy, {tokens} tokens), *wrong* any other
text; *refused* is an error, or a stream cut off after correct text; *cancelled* requests were left
by the driver. A *hang* exceeds the limit of a decode leg. An engine that the campaign had not
killed *died*. A *leak* is a block pool above its baseline after all deadlines, *late* one that
needed more than {at_once:g} s. The *probe* is two requests afterwards.

A promise is *kept* if nothing was wrong, hung, died or leaked, and the probe was right.
"""


class Cases(list[dict[str, Any]]):
    """Faults of one kind, and their totals."""

    def outcomes(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for case in self:
            total.update(case["outcomes"])
        return total

    def broken(self) -> Counter[str]:
        """Return the number of faults that have led to each kind of finding."""
        return Counter(kind for case in self for kind in {_kind(finding) for finding in case["findings"]})

    def verdict(self) -> str:
        if not self:
            return "-"
        broken = self.broken()
        if not broken:
            return f"kept ({len(self)})"
        return f"**{', '.join(f'{kind} {count}' for kind, count in sorted(broken.items()))}** of {len(self)}"


def _kind(finding: str) -> str:
    for word, kind in (("wrong answer", "wrong"), ("hang", "hang"), ("died", "died"), ("leaks", "leak")):
        if word in finding and not finding.startswith("probe"):
            return kind
    return "probe"


def _by(cases: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[str, ...], Cases]:
    found: dict[tuple[str, ...], Cases] = {}
    for case in cases:
        found.setdefault(tuple(case[key] for key in keys), Cases()).append(case)
    return found


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def _summary(cases: Cases) -> str:
    rows = []
    for (name, tp), some in sorted(_by(cases, "connector", "tp").items()):
        outcomes, broken = some.outcomes(), some.broken()
        waits = [float(part.split(" s")[0].rsplit(" ", 1)[1]) for case in some for part in case["late"]]
        late = f"{len(waits)} ({statistics.median(waits):g} s, at most {max(waits):g} s)" if waits else "0"
        numbers = [outcomes[outcome] for outcome in OUTCOMES]
        kept = sum(not case["findings"] for case in some)
        others = (broken["died"], broken["leak"], broken["probe"])
        rows.append([name, _shape(tp), len(some), kept, *numbers, *others, late])
    titles = ["connector", "TP", "faults", "kept", *OUTCOMES, "engine died", "leak", "probe", "late (median, most)"]
    return _table(titles, rows)


def _shape(options: str) -> str:
    """Return the options of a shape as text: `1:1 --dp 2:1` is "1 → 1, dp 2 → 1"."""
    return options.replace(":", " → ").replace(" --", ", ")


def _kinds(cases: Cases) -> str:
    names = sorted({case["connector"] for case in cases}, key=_rank)
    by = _by(cases, "what", "connector")
    families = ("none", "kill", "stop", "cancel", "reference", "pair")
    order = {case["what"]: families.index(case["family"]) for case in cases}
    whats = sorted(order, key=lambda what: (order[what], what))
    return _table(["fault", *names], ([what, *(by.get((what, n), Cases()).verdict() for n in names)] for what in whats))


def _phases(cases: Cases) -> str:
    rows = []
    for (name, tp, what, phase), some in sorted(_by(cases, "connector", "tp", "what", "phase").items()):
        outcomes = some.outcomes()
        hits = Counter(case["hit"] for case in some)
        hit = ", ".join(f"{where} {count}" for where, count in sorted(hits.items()))
        rows.append([name, tp, what, phase, hit, len(some), *(outcomes[o] or "" for o in OUTCOMES), some.verdict()])
    return _table(["connector", "TP", "fault", "aimed at", "hit", "faults", *OUTCOMES, "verdict"], rows)


def _findings(cases: Cases) -> str:
    lines = []
    for case in cases:
        if not case["findings"]:
            continue
        command = f"--connector {case['connector']} --tp {case['tp']} --seed {case['seed']} --only {case['index']}"
        command = f"--pairs {command}" if case["family"] == "pair" else command
        lines.append(f"- `{command}`: {case['what']}, {case['hit']}: **{'; '.join(case['findings'])}**.")
        lines += [f"  `{line.replace('`', '')}`" for line in case.get("logs", ())[:2]]
    return "\n".join(lines) or "None."


def _rank(name: str) -> tuple[int, str]:
    return (list(PRESETS).index(name) if name in PRESETS else len(PRESETS), name)


def page(source: str, results: dict[str, dict[str, Any]], reading: str = "") -> str:
    """Return the page. ``reading``, a person's interpretation, stands in for the details."""
    cases = Cases(case for case in results.values() if "not_applicable" not in case)
    away = len(results) - len(cases)
    names = sorted({case["connector"] for case in cases}, key=_rank)
    versions = sorted({", ".join(f"{k} {v}" for k, v in case["versions"].items()) for case in cases})
    runs = _by(cases, "connector", "tp", "seed")
    settings = [
        f"- {name}: {PRESETS[name].settings}. Limit of a decode leg: {PRESETS[name].bound_s:g} s; blocks may be"
        f" held for {PRESETS[name].held_s:g} s."
        for name in names
        if name in PRESETS
    ]
    head = HEAD.format(
        title=" and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names),
        source=source,
        tokens=ANSWER_TOKENS,
        at_once=AT_ONCE_S,
    )
    conditions = [
        f"- Versions: {'; '.join(versions)}. Measured on {', '.join(sorted({case['on'] for case in cases}))}.",
        "- Campaigns: "
        + "; ".join(f"{name} TP {tp} seed {seed}, {len(some)} faults" for (name, tp, seed), some in runs.items())
        + f". {away} more did not apply, because the connector has no such parameter to alter.",
        "- Repeat one: `python -m tests.campaigns.faults.campaign --connector NAME --tp P:D --seed S --only INDEX`."
        " The seed fixes the fault, its moment and the prompts, but not the machine's scheduling.",
        f"- Servers: chunks of 256 tokens, blocks of 32, a pool of {POOL_BLOCKS} blocks (so that a freed block is soon"
        " another request's), prefix cache off, float32, eager mode. They are forked from a process that has imported"
        " vLLM, and poll for their next step every 10 ms instead of every second. Several pairs and other work shared"
        " two cores; every limit allows for that.",
        *settings,
    ]
    parts = [head, _summary(cases), "", "## By fault\n", _kinds(cases), ""]
    if reading:
        return "\n".join([*parts, reading.rstrip()]) + "\n"
    wrapped = [textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in conditions]
    parts += ["## Conditions\n", *wrapped, "", "## By phase\n", _phases(cases), "", "## Every finding\n"]
    return "\n".join([*parts, _findings(cases)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    arguments = parser.parse_args()
    old = arguments.page.read_text() if arguments.page.exists() else ""
    reading = old[old.index(INTERPRETATION) :] if INTERPRETATION in old else ""
    arguments.page.write_text(page(str(arguments.results), json.loads(arguments.results.read_text()), reading))


if __name__ == "__main__":
    main()
