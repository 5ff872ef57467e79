"""The configuration reference equals the settings."""

from pathlib import Path

import pytest

from configs import reference as module
from configs.reference import PAGE, reference


def test_the_committed_page_is_current() -> None:
    """`python -m configs.reference` would change nothing."""
    assert PAGE.read_text() == reference()


@pytest.mark.parametrize("heading", ["\n## `transfer`", "\n## `router`"])
def test_text_after_a_list_of_keys_stays(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, found, after = PAGE.read_text().partition(heading)
    page = tmp_path / "page.md"
    page.write_text(f"{before}\nA paragraph.\n\n- a list\n{found}{after}")
    monkeypatch.setattr(module, "PAGE", page)
    assert reference() == page.read_text()


def test_every_setting_is_explained() -> None:
    entries = reference().split("\n- `")[1:]
    assert len(entries) > 100
    assert [entry for entry in entries if entry.split("\n\n")[0].endswith(":")] == []
