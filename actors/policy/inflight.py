"""State of one request in flight: its replicas and the times of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.policy.prompts import Prompt


@dataclass
class InflightRequest:
    """A request's legs on a decode replica and, on the remote route, a prefill replica.

    ``held_tokens``         tokens cached on the engine that computes the prompt
    ``decode_held_tokens``  tokens cached on the decode engine
    ``streams``             other streams on decode when the request was sent
    ``began_at``            time of dispatch, in seconds
    ``added``               prefix pieces that each engine holds only if the request succeeds
    ``prefilled_at``        time of the prefill engine's answer; None before
    ``opened_at``           time of the first token; None before
    """

    key: int
    prompt: Prompt = field(repr=False)
    decode: str
    prefill: str | None
    prompt_tokens: int
    held_tokens: int
    decode_held_tokens: int
    streams: int
    began_at: float
    added: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

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
