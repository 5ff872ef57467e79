"""Prompt digests, and whether a transfer would divide an image: equal on both its engines."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from connectors.protocol.params import prompt_digest
from connectors.vllm_hma.model.media import divides_image

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Prompts:
    """``whole_images``: whether tokens of an image attend to later tokens of it."""

    def __init__(self, whole_images: bool) -> None:
        self._whole_images = whole_images
        self._salt = ""

    def digest(self, request: Request, moved: bool = False) -> str:
        """Return the digest of a prompt, and of the output if ``moved``.

        Workers add the LoRA content, which only they know.
        """
        others = [f"{f.identifier}@{f.mm_position.offset}+{f.mm_position.length}" for f in request.mm_features]
        if request.cache_salt is not None:
            others.append(request.cache_salt)
        if self._salt:
            others.append(f"reset {self._salt}")
        return prompt_digest([*request.all_token_ids] if moved else request.prompt_token_ids, others)

    def reset(self) -> None:
        """Make later digests differ from earlier ones, and from those of all other engines."""
        self._salt = uuid.uuid4().hex

    def divides_image(self, request: Request, token: int) -> bool:
        return self._whole_images and divides_image(request, token)
