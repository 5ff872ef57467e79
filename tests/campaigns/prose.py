"""Print a random sample of docstrings and messages of the product, to judge them by
CONTRIBUTING.md.

    python -m tests.campaigns.prose --seed 1 --count 100 [--root DIR]

`--root` is another checkout, for comparison.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("app", "actors", "connectors", "configs")
FEWEST_WORDS = 4
"""A shorter string is a name or a key."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring and message of a source file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, ast.unparse(node)[2:-1]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def sample(root: Path, seed: int, count: int) -> list[str]:
    """Return `count` texts with their locations, always the same for a seed and a tree."""
    found = [
        f"{path.relative_to(root)}:{line}  {' '.join(text.split())}"
        for package in PRODUCT
        for path in sorted((root / package).rglob("*.py"))
        for line, text in sorted(texts(path))
        if len(text.split()) >= FEWEST_WORDS
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    options = parser.parse_args()
    print("\n".join(sample(options.root, options.seed, options.count)))


if __name__ == "__main__":
    main()
