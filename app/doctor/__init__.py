"""Check a machine before it serves: `make doctor`, `python -m app.doctor --config FILE`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One result of a check. ``remedy`` is empty if and only if the check has passed."""

    check: str
    what: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return not self.remedy

    def __str__(self) -> str:
        line = f"{'ok  ' if self.ok else 'FAIL'}  {self.check:<13} {self.what}"
        return line if self.ok else f"{line}\n      {'':<13} -> {self.remedy}"
