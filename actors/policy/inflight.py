"""One request in flight: its replicas and the times of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.policy.prompts import Prompt


@dataclass
class InflightRequest:
    """A request's legs on a decode replica and, unless decode computes the prompt, a prefill
    replica."""

    key: int
    prompt: Prompt = field(repr=False)
    decode: str
    prefill: str | None
    prompt_tokens: int
    held_tokens: int
    """Tokens cached on the engine that computes the prompt."""
    decode_held_tokens: int
    streams: int
    """Number of other streams on decode when the request was sent."""
    began_at: float
    added: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    """Prefix pieces that each engine holds only if the request succeeds."""
    prefilled_at: float | None = None
    opened_at: float | None = None
    opened_stream_seconds: float = 0.0
    opened_computed_tokens: int = 0
    over: bool = False

    @property
    def new_tokens(self) -> int:
        return max(self.prompt_tokens - self.held_tokens, 1)

    @property
    def moved_tokens(self) -> int:
        return max(self.prompt_tokens - self.decode_held_tokens, 1)
