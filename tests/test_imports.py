"""Import rules between tests, campaigns, benchmarks and shared test code."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.imports import imported

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("app", "actors", "connectors", "configs")
FORBIDDEN = {
    "tests": ("benchmarks",),
    "benchmarks": ("tests",),
    "testing": ("tests", "benchmarks"),
    **dict.fromkeys(PRODUCT, ("tests", "testing", "benchmarks")),
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    """Tests and benchmarks do not import each other; the product imports neither, nor their
    shared code.
    """
    wrong = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for module in sorted(imported(path))
        if module.partition(".")[0] in FORBIDDEN[package]
    ]
    assert wrong == []
