"""Digests of symbols of installed packages, to detect upgrades that change one the product uses."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from pathlib import Path


def source_of(path: str) -> str:
    """Return the text of an installed package's file, without importing the package."""
    top, _, rest = path.partition("/")
    spec = importlib.util.find_spec(top)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], rest).read_text(encoding="utf-8")


def digest(source: str, symbol: str) -> str:
    """Return a digest of the code of a function, class or method, without comments and layout."""
    scope: ast.AST = ast.parse(source)
    for name in symbol.split("."):
        scope = next(node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name)
    return hashlib.sha256(ast.dump(scope).encode()).hexdigest()[:12]
