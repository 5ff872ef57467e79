"""Make vLLM's hashes of names that clients give to images differ from its hashes of contents.

A client may name an image itself (``uuid`` of a content part). With ``mm_processor_kwargs`` or
``media_io_kwargs``, vLLM uses a hash of that name, which looks like one of content. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/multimodal/processing/inputs.py
"""

from __future__ import annotations

import re

from vllm.config.multimodal import MMHasherAlgorithm
from vllm.multimodal.hasher import MultiModalHasher

_HASH = MultiModalHasher.hash_kwargs
_BY_CLIENT = "named-by-client-"
_DIGEST = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
"""Digests of BLAKE3 or SHA-256, and of SHA-512 (``mm_hasher_algorithm``)."""


def is_digest(name: str) -> bool:
    """``name``: without an adapter's name."""
    return _DIGEST.fullmatch(name) is not None


def mark_names_of_clients() -> None:
    """Prefix hashes of clients' names, in a process that parses requests. Idempotent."""

    def hash_kwargs(algorithm: MMHasherAlgorithm, /, **kwargs: object) -> str:
        name = _HASH(algorithm, **kwargs)
        return f"{_BY_CLIENT}{name}" if _of_client(kwargs) else name

    MultiModalHasher.hash_kwargs = staticmethod(hash_kwargs)


def _of_client(hashed: dict[str, object]) -> bool:
    """Return whether one of these values is a client's name.

    vLLM hashes the model's name with the client's name, a string, or with the image, which is never
    a string. For videos of Qwen3-VL, it hashes the result again (``mm_hash``).
    """
    first = hashed.get("mm_hash")
    if isinstance(first, str):
        return not is_digest(first)
    return any(isinstance(value, str) for key, value in hashed.items() if key != "model_id")
