"""Digests of symbols of installed packages, to detect upgrades that change one the product uses."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

EMPTY_LISTS = {"show_empty": True} if sys.version_info >= (3, 13) else {}
"""Option of `ast.dump` that prints empty lists, as Python before 3.13 does without it."""


def changes(guards: Mapping[str, str], file: str) -> list[str]:
    """Return a line for each symbol whose code is not what `file` was written for.

    ``guards``  digest of each symbol, by `file:symbol` in an installed package
    """
    lines = []
    for place, expected in guards.items():
        path, _, symbol = place.partition(":")
        try:
            found = digest(source_of(path), symbol)
        except (LookupError, FileNotFoundError):
            lines.append(f"{place} is gone (renamed or moved): adapt or delete {file}, then change its guard")
            continue
        if found != expected:
            lines.append(f"{place} has changed to {found}: read it, adapt or delete {file}, then change its guard")
    return lines


def source_of(path: str) -> str:
    """Return the text of an installed package's file, without importing the package."""
    top, _, rest = path.partition("/")
    spec = importlib.util.find_spec(top)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], rest).read_text(encoding="utf-8")


def digest(source: str, symbol: str) -> str:
    """Return a digest of the code of a function, class or method, without comments and layout.

    It is the same for all releases of Python. Raises LookupError if there is no such symbol.
    """
    scope: ast.AST = ast.parse(source)
    for name in symbol.split("."):
        nodes = ast.iter_child_nodes(scope)
        if (found := next((node for node in nodes if getattr(node, "name", None) == name), None)) is None:
            raise LookupError(f"no {name} in the source")
        scope = found
    # Python 3.12 adds a field to functions and classes.
    text = ast.dump(scope, **EMPTY_LISTS).replace(", type_params=[]", "")
    return hashlib.sha256(text.encode()).hexdigest()[:12]
