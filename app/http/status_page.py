"""The status page: one self-contained HTML file that requests its data from `/tandem/status`."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parent / "status.html"


@cache
def status_page() -> str:
    return PAGE.read_text(encoding="utf-8")


def _policy() -> str:
    """Return a Content-Security-Policy for the page's own script, style and origin only."""
    text = status_page()
    script, style = (_hash_of(text, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(text: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


PAGE_HEADERS = {
    "Content-Security-Policy": _policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
