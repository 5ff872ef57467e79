"""Merge the Prometheus expositions of several processes and add the labels role and replica.

Groups and labels lines as text. Parsing and formatting the numbers would block the router's event
loop for 40 ms per engine.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Source = tuple[str, str, str]
"""Role, replica id and the exposition of one process."""

SUFFIXES = {"summary": ("", "_count", "_sum"), "histogram": ("_bucket", "_count", "_sum")}
"""Suffixes of the sample names of a family, by type. Other types have no suffix."""

SINCE = "_created"
"""Suffix of families with creation times, which `merge` omits."""

LABEL = re.compile(r'[\s,]*(\w+)\s*=\s*("(?:[^"\\]|\\.)*")')


@dataclass
class Family:
    """HELP and TYPE lines of the first process that has them, and the samples of all processes."""

    declared: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merge(sources: Iterable[Source]) -> str:
    """Return one exposition of the samples of `sources`, grouped by family.

    Each sample has the labels `role` and `replica`. Families with creation times are omitted.
    """
    families: dict[str, Family] = {}
    for role, replica, text in sources:
        _add(families, f'role="{_escaped(role)}",replica="{_escaped(replica)}"', text)
    found = (family for name, family in families.items() if not name.endswith(SINCE))
    lines = [line for family in found for line in (*family.declared.values(), *family.samples)]
    return "".join(f"{line}\n" for line in lines)


def _add(families: dict[str, Family], origin: str, text: str) -> None:
    family, current, names = Family(), "", frozenset[str]()
    for raw in text.split("\n"):  # not `splitlines`: label values may contain other line separators
        line = raw.strip()
        if line.startswith("#"):
            mark, keyword, name, *rest = (*line.split(None, 3), "", "", "")
            if mark == "#" and keyword in ("HELP", "TYPE"):
                family = families.setdefault(name, Family())
                family.declared.setdefault(keyword, line)
                if keyword == "TYPE" or name != current:
                    kind = rest[0] if keyword == "TYPE" else ""
                    names = frozenset(name + suffix for suffix in SUFFIXES.get(kind, ("",)))
                current = name
        elif line:
            name, sample = _labelled(line, origin)
            (family if name in names else families.setdefault(name, Family())).samples.append(sample)


def _labelled(line: str, origin: str) -> tuple[str, str]:
    """Return a sample's name, and its line with `origin` in place of its own role and replica."""
    head, brace, rest = line.partition("{")
    if not brace:
        name, _, value = line.replace("\t", " ").partition(" ")
        return name, f"{name}{{{origin}}} {value}"
    name = head.rstrip()
    if "role" in rest or "replica" in rest:
        rest = _without_origin(rest)
    comma = "" if rest.startswith("}") else ","
    return name, f"{name}{{{origin}{comma}{rest}"


def _without_origin(rest: str) -> str:
    kept, end = [], 0
    while label := LABEL.match(rest, end):
        if label[1] not in ("role", "replica"):
            kept.append(f"{label[1]}={label[2]}")
        end = label.end()
    return ",".join(kept) + rest[end:].lstrip(" \t,")


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
