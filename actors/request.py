"""Calls from routers to engines, and the items of their answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

Endpoint = Literal[
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions/batch",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/generative_scoring",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/invocations",
]

Body = Mapping[str, Any]

Headers = tuple[tuple[bytes, bytes], ...]

TokenGroup = tuple[int, ...]

ReplayLog = tuple[TokenGroup, ...]

TRANSFER_FIELD = "kv_transfer_params"
"""Field of a request body with the parameters of a transfer; clients may not set it."""


KEEP_ALIVE = b": keep-alive\n\n"
"""SSE comment to clients before the first token, with vLLM's text (`sse_keep_alive.py`)."""


@dataclass(frozen=True)
class ProducerAddress:
    """Identity and side channel of a prefill engine, as its connector reports them."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    first_token_multiple: int = 0
    """Granularity in prompt tokens of the KV sent by an engine that samples the first token.

    0 if the engine cannot sample it.
    """


@dataclass(frozen=True)
class Call:
    """An HTTP request to an engine; `replay_log` is empty unless the call resumes a stream."""

    method: str
    path: str
    """Percent-encoded path, with `?` and the query if there is one."""
    headers: Headers = ()
    body: bytes = field(default=b"", repr=False)
    replay_log: ReplayLog = field(default=(), repr=False)
    sequences: int = 1
    movable: bool = False
    """Whether the caller continues the stream on another engine after `Moved`."""
    transfer: Mapping[str, Any] | None = field(default=None, repr=False)
    """`Moved.transfer` of the engine that computed `replay_log`."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First item of the answer to each accepted call.

    ``ongoing``  number of the engine's ongoing sequences, this call's included
    """

    replica: str
    ongoing: int = 1


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Signal that the engine core has answered a no-op request or sampled a first token."""

    tokens: bool = False
    """Whether the engine has sampled the first token of an answer that is not streamed.

    True in at most one heartbeat of a call; in none if this token ends the answer.
    """


class TokenSource(NamedTuple):
    """Identity of what computes an answer's tokens; only an equal one may continue the answer.

    ``engine``   identity of the engine (`EngineReplica.identity`)
    ``adapter``  identity of the LoRA adapter's content; empty for the base model
    """

    engine: str
    adapter: str = ""


@dataclass(frozen=True)
class EngineTimings:
    """Times of the events of one call in its engine, in seconds since the call's arrival.

    ``queued_s``       the request is sent to the engine's scheduler
    ``scheduled_s``    the first step with the request begins
    ``first_token_s``  the last step of the prompt ends
    ``answered_s``     a stream's chunk with the first token is sent; for an answer that is not a
                       stream, its start is sent
    ``kv_asked_s``     blocks are allocated and KV is requested; None if no KV was requested
    ``kv_ended_s``     all KV has arrived, or the transfer has failed; None without a transfer
    ``kv_failed``      whether the transfer failed
    ``store_asked_s``  the lookup in the KV store begins; None without one
    ``store_ended_s``  all KV from the store is read and verified, or the fetch has ended without
                       it; None without a lookup
    """

    queued_s: float
    scheduled_s: float
    first_token_s: float
    answered_s: float
    kv_asked_s: float | None = None
    kv_ended_s: float | None = None
    kv_failed: bool = False
    store_asked_s: float | None = None
    store_ended_s: float | None = None

    @property
    def received_kv(self) -> bool:
        """True if the KV of the transfer has arrived whole."""
        return self.kv_ended_s is not None and not self.kv_failed


class ResponseStart(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Status and headers of a response; precedes the items of its body."""

    status: int
    headers: Headers
    timings: EngineTimings | None = None
    """Timings of an answer that is not a stream; None if vLLM has no statistics of the call."""

    @property
    def streams(self) -> bool:
        return any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers
        )


class StreamChunk(msgspec.Struct, frozen=True, array_like=True):
    """Part of a response body with new tokens or timings: a TokenChunk or a FirstTokenChunk.

    ``groups``   token groups recorded since the previous chunk. No other engine can resume an
                 answer that is not recorded
    ``timings``  in the chunk of the first token, if vLLM has statistics of the call
    """

    body: bytes
    groups: ReplayLog
    timings: EngineTimings | None = None


class TokenChunk(StreamChunk, frozen=True, array_like=True, tag=3):
    """Chunk with new tokens or timings, other than a FirstTokenChunk.

    ``prompt_digest``  in the first chunk with a token group; None for prompt embeddings
    ``source``         in the first chunk at which it is known
    """

    prompt_digest: bytes | None = None
    source: TokenSource | None = None
    prefilled: int = 0
    """Number of tokens of the replay log that the engine computed with the prompt, in the first
    chunk; 0 if it repeated them in as many steps.
    """


class FirstTokenChunk(StreamChunk, frozen=True, array_like=True, tag=4):
    """Chunk with the first token, from a prefill engine that was asked to sample it."""

    prompt_tokens: int = 0
    prompt_digest: bytes | None = None
    source: TokenSource | None = None


PrefillOutcome = Literal["accepted", "full", "leaving", "computed", "rejected", "failed", "silent", "late", "alone"]
"""What has become of a prefill call, or of the prompt.

    accepted  the engine computes the prompt
    full      it has no free slot
    leaving   it is stopping
    computed  the prompt is computed; decode may still lack KV
    rejected  the engine answered with a 4xx status, or without the first token
    failed    the engine died, answered with a 5xx status or had an internal error
    silent    it sent nothing for `silence_timeout_s`
    late      it did not answer within `prefill_timeout_s`
    alone     no further prefill engine is called: decode computes the prompt
"""


class PrefillReport(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Report of a decode engine about its call to a prefill engine (`RpcRequest.prefill`).

    ``replica``   id of the prefill engine; empty if the outcome is `alone`
    ``tried_s``   from the acceptance of decode's call to the beginning of this try
    ``took_s``    from the beginning of this try to this outcome
    ``ongoing``   number of the prefill engine's ongoing sequences, if it has `accepted`
    ``message``   cause of a failure; of `alone`: the reason of the local request
    """

    replica: str
    outcome: PrefillOutcome
    tried_s: float
    took_s: float
    ongoing: int = 0
    prompt_tokens: int | None = None
    timings: EngineTimings | None = None
    message: str = ""


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Last item of a stream that another engine is to continue: this engine is stopping.

    The caller cancels the call once the other engine has the KV.

    ``transfer``  parameters with which it receives the KV; empty if it must compute all tokens
    """

    transfer: dict[str, Any]


Item = Accepted | Heartbeat | ResponseStart | TokenChunk | FirstTokenChunk | PrefillReport | Moved | bytes
