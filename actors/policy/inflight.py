"""State of one request in flight: its engines and the times of its stages."""

from dataclasses import dataclass, field

from actors.policy.prompts import Prompt


@dataclass
class InflightRequest:
    """A request's legs on a decode engine and, on the remote route, a prefill engine.

    Times are those of the planner's caller, in seconds; None until the event is reported.
    """

    key: int
    prompt: Prompt = field(repr=False)
    decode: str
    prefill: str | None
    prompt_tokens: int  # estimated; the exact number once prefill reports it
    held_tokens: int  # estimated, cached on the engine that computes the prompt
    loaded_tokens: int  # estimated, loaded from this engine's KV store
    decode_held_tokens: int  # estimated, cached on the decode engine
    streams: int  # this router's streams on the decode engine at `Planner.begin`
    # Prefix pieces that each engine caches only if its leg succeeds.
    added: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    prefilled_at: float | None = None
    opened_at: float | None = None  # time of the first token of a stream
    opened_stream_seconds: float = 0.0  # of the decode engine's load at `opened_at`
    opened_computed_tokens: int = 0  # of the decode engine's load at `opened_at`
    over: bool = False

    @property
    def new_tokens(self) -> int:
        return max(self.prompt_tokens - self.held_tokens - self.loaded_tokens, 1)

    @property
    def moved_tokens(self) -> int:
        return max(self.prompt_tokens - self.decode_held_tokens, 1)
