"""The configuration reference equals the settings."""

from pathlib import Path

from configs.reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_current() -> None:
    """`python -m configs.reference` would change nothing."""
    assert PAGE.read_text() == reference()


def test_every_setting_is_explained() -> None:
    """No key is without a description."""
    entries = reference().split("\n- `")[1:]
    assert len(entries) > 100
    assert [entry for entry in entries if entry.split("\n\n")[0].endswith(":")] == []
