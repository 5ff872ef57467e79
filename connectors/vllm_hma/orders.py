"""Messages from the connector's scheduler side to its worker side, one ``Orders`` per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from connectors.protocol.params import EngineAddress
from connectors.vllm_hma.kv_store.orders import StoreOrders
from connectors.vllm_hma.model.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Expect:
    """vLLM has queued a prefill request whose KV this engine sends.

    ``prompt_digest``  digest of the prompt without ``adapter``
    """

    request_id: str
    transfer_id: str
    prompt_tokens: int
    prompt_digest: str
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt that this step computes.

    ``new_ids``          block ids to append to each group's block table
    ``computed_tokens``  prompt tokens computed after this step
    ``last``             whether it is the last chunk of the prompt
    """

    request_id: str
    new_ids: tuple[tuple[int, ...], ...]
    computed_tokens: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a prefill request with a transfer, or of the transfer alone after a reset.

    ``held``    whether its blocks stay allocated until they are sent
    ``reason``  why this engine does not send the KV; empty if held
    """

    request_id: str
    held: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Queue:
    """A request without blocks: the producer must report when it starts the prompt."""

    request_id: str
    transfer_id: str
    producer: EngineAddress


@dataclass(frozen=True, slots=True)
class Receive:
    """Fill a request's blocks with the KV of tokens ``[start_token, end_token)``.

    ``prompt_digest``  digest of the prompt without ``adapter``
    ``tables``         block table of each group
    ``loaded_token``   token before which the KV store supplies full attention; 0: none
    """

    request_id: str
    transfer_id: str
    producer: EngineAddress
    prompt_digest: str
    tables: tuple[tuple[int, ...], ...]
    start_token: int
    end_token: int
    loaded_token: int = 0
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """A request needs no KV from its producer and has no blocks that the producer may write.

    Every rank cancels the transfer at its partners.
    """

    transfer_id: str
    producer: EngineAddress


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """Orders of one step; each list is in the order of events.

    ``expects``    new prefill requests
    ``starts``     ids of requests whose prompts start in this step or the next
    ``preempted``  ids of preempted prefill requests
    ``chunks``     chunks that this step computes
    ``finished``   ended prefill requests
    ``queues``     new decode requests without blocks
    ``receives``   decode requests whose blocks are allocated
    ``aborts``     ids of aborted decode requests
    ``releases``   decode requests that need no KV
    ``discards``   ids of transfers whose KV no engine will fetch
    ``lost``       ids or prefixes of ended engines (``params.names_engine``)
    ``report``     whether workers report this step even without changes: vLLM then calls the
                   scheduler side, which checks whether delayed requests fit
    ``store``      copies of the KV store; None without a store
    """

    expects: list[Expect] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    queues: list[Queue] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    discards: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    report: bool = False
    store: StoreOrders | None = None


@dataclass(frozen=True, slots=True)
class EncodedAgentMetadata(KVConnectorHandshakeMetadata):
    """One worker's encoded agent metadata, for the scheduler's process."""

    agent_metadata: bytes
