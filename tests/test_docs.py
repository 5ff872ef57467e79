"""Links between Markdown pages, and limits on the pages' form."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.campaigns.registry import CAMPAIGNS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    Path(line)
    for line in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
]
LINK = re.compile(r"(?<!`)\[(?:[^\]]|\n)*?\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


def broken_links(page: Path, folder: Path) -> list[str]:
    """Return the broken relative links of `page`; they are relative to `folder`."""
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (folder / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_relative_links_lead_somewhere(page: Path) -> None:
    """Each link names a file of the project and, after `#`, one of its headings."""
    assert broken_links(ROOT / page, (ROOT / page).parent) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """Of a missing file, a missing heading and a good link, the first two are reported."""
    page = tmp_path / "page.md"
    page.write_text("# One heading\n\n[a](missing.md) [b](page.md#no-heading) [c](#one-heading) [d](page.md)\n")
    assert broken_links(page, tmp_path) == ["missing.md", "page.md#no-heading"]


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links each page of docs/, and docs/decisions/README.md each decision."""
    for folder in (ROOT / "docs", ROOT / "docs" / "decisions"):
        index = (folder / "README.md").read_text()
        assert [page.name for page in folder.glob("*.md") if page.name != "README.md" and page.name not in index] == []


def test_the_source_tree_in_the_architecture_exists() -> None:
    """Each line begins with a folder, or continues the last one; its files are in that folder."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = text.partition("## The source tree")[2].split("```")[1]
    folder, missing, seen = ROOT, [], 0
    for line in tree.strip().splitlines():
        name, described = line[:24].strip(), line[24:]
        folder = ROOT / name if name else folder
        below, colon, rest = described.partition("/: ")
        own = folder / below if colon else folder
        named = re.findall(r"[\w/]+\.(?:py|yaml)|[\w/]+/(?=\s|$)", rest if colon else described)
        seen += len(named)
        missing += [
            f"{own}/{file}" for file in named if not any((place / file).exists() for place in (own, folder, ROOT))
        ]
        missing += [] if own.is_dir() else [str(own)]
    assert (missing, seen > 40) == ([], True)


def unknown_commands(text: str) -> set[str]:
    """Return the targets, campaigns and benchmarks that a text names and that do not exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    benchmarks = re.findall(r"^([a-z-]+) +benchmarks\.", (ROOT / "benchmarks/__main__.py").read_text(), re.MULTILINE)
    commands = set(re.findall(r"[`$] *make\s+([a-z][a-z-]*)", text))
    names = set(re.findall(r"\bNAME=([a-z-]+)", text))
    return (commands - targets) | (names - {*CAMPAIGNS, *benchmarks})


def test_commands_exist() -> None:
    """Each `make TARGET` and `NAME=…` of a page or an example exists."""
    files = [*PAGES, *(path.relative_to(ROOT) for path in (*ROOT.glob("configs/*.yaml"), *ROOT.glob("k8s/**/*.yaml")))]
    assert {str(file): found for file in files if (found := unknown_commands((ROOT / file).read_text()))} == {}
    assert unknown_commands("`make\ngrids`, `make test`, $ make no NAME=faults NAME=none") == {"grids", "no", "none"}


GENERATED = "docs/configuration.md"
WORDS = {"README.md": 700, "docs/decisions/0": 250, "docs/": 1500}
"""Largest number of words by the beginning of a page's path."""


def test_pages_are_short() -> None:
    """Each page has a budget, and all together 40,000 words (CONTRIBUTING.md)."""
    words = {str(page): len((ROOT / page).read_text().split()) for page in PAGES if (ROOT / page).exists()}
    budgets = {
        page: next((limit for start, limit in WORDS.items() if page.startswith(start)), 1500)
        for page in words
        if page != GENERATED
    }
    assert {page: words[page] for page, limit in budgets.items() if words[page] > limit} == {}
    assert sum(words.values()) <= 40_000
