"""Parse Kubernetes' quantities."""

from __future__ import annotations

_SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def amount(quantity: str | float) -> float:
    """Return a quantity as a number: `500m` is 0.5, `2Gi` is 2**31. Raises ValueError."""
    text = str(quantity)
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * _SUFFIXES[suffix]
    return float(text)
