"""The configuration reference equals the settings."""

from pathlib import Path

from configs.reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_current() -> None:
    """`python -m configs.reference > docs/configuration.md` would change nothing."""
    assert PAGE.read_text() == reference()


def test_every_setting_is_explained() -> None:
    """A key without a description would be an empty cell."""
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.rstrip().endswith("|  |")] == []
