"""Print the tables of docs/faults.md: ``python -m tests.campaigns.faults.report RESULTS``.

RESULTS is a report of the campaign (``build/campaigns/faults.json``) or
``benchmarks/results/faults.json``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OUTCOMES = ("right", "refused", "cancelled", "wrong", "hang")
KINDS = (("wrong answer", "wrong"), ("hang", "hang"), ("died", "died"), ("leaks", "leak"))


def _kind(finding: str) -> str:
    if finding.startswith("probe"):
        return "probe"
    return next((kind for word, kind in KINDS if word in finding), "probe")


def _verdict(cases: Sequence[dict[str, Any]]) -> str:
    broken = Counter(kind for case in cases for kind in {_kind(finding) for finding in case["findings"]})
    if not broken:
        return f"kept ({len(cases)})" if cases else "-"
    return f"**{', '.join(f'{kind} {count}' for kind, count in sorted(broken.items()))}** of {len(cases)}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def main(path: str) -> None:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    cases = [case for case in found.get("rows", found.values()) if "not_applicable" not in case]
    names = list(dict.fromkeys(case["connector"] for case in cases))
    totals = []
    for name in names:
        mine = [case for case in cases if case["connector"] == name]
        outcomes = sum((Counter(case["outcomes"]) for case in mine), Counter[str]())
        kept = sum(not case["findings"] for case in mine)
        totals.append(
            [name, len(mine), kept, *(outcomes[one] for one in OUTCOMES), sum(bool(case["late"]) for case in mine)]
        )
    print(_table(["connector", "faults", "kept", *OUTCOMES, "late pools"], totals), "\n")
    order = {case["what"]: (case["family"], case["what"]) for case in cases}
    rows = [
        [
            what,
            *(
                _verdict([case for case in cases if (case["what"], case["connector"]) == (what, name)])
                for name in names
            ),
        ]
        for what in sorted(order, key=order.__getitem__)
    ]
    print(_table(["fault", *names], rows))


if __name__ == "__main__":
    main(sys.argv[1])
