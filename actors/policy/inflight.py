"""State of one request in flight: its replicas and the times of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.policy.prompts import Prompt


@dataclass
class InflightRequest:
    """A request's legs on a decode replica and, on the remote route, a prefill replica.

    Times are those of the planner's caller, in seconds.

    ``prompt_tokens``           estimated prompt tokens; the exact number once prefill reports it
    ``held_tokens``             estimated tokens cached on the engine that computes the prompt
    ``loaded_tokens``           estimated tokens that this engine loads from its KV store
    ``decode_held_tokens``      estimated prompt tokens cached on the decode engine
    ``streams``                 this router's streams on the decode engine at `began_at`
    ``began_at``                time of `Planner.begin`
    ``added``                   prefix pieces that each engine caches only if its leg succeeds
    ``prefilled_at``            time at which prefill had computed the prompt; None until reported
    ``opened_at``               time of the first token of a stream; None until then
    ``opened_stream_seconds``   `EngineLoad.stream_seconds` of the decode engine at `opened_at`
    ``opened_computed_tokens``  `EngineLoad.computed_tokens` of the decode engine at `opened_at`
    ``over``                    whether the legs have ended
    """

    key: int
    prompt: Prompt = field(repr=False)
    decode: str
    prefill: str | None
    prompt_tokens: int
    held_tokens: int
    loaded_tokens: int
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
        return max(self.prompt_tokens - self.held_tokens - self.loaded_tokens, 1)

    @property
    def moved_tokens(self) -> int:
        return max(self.prompt_tokens - self.decode_held_tokens, 1)
