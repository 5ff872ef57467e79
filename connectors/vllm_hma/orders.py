"""Messages from the connector's scheduler side to its worker side, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from connectors.protocol.params import EngineAddress
from connectors.vllm_hma.kv_store.orders import StoreOrders


@dataclass(frozen=True, slots=True)
class Expect:
    """vLLM has queued a request whose KV is to be produced."""

    request_id: str
    transfer_id: str
    prompt_tokens: int
    prompt_digest: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """This step computes the request up to ``computed_tokens``; ``new_ids[g]`` extend group g's block table.

    ``last`` marks the last chunk of its prompt.
    """

    request_id: str
    new_ids: tuple[tuple[int, ...], ...]
    computed_tokens: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A produced request has ended; its blocks stay allocated if ``held``, else ``reason`` says why not."""

    request_id: str
    held: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Queue:
    """Ask the producer to report when it is about to start the prompt; the request allocates its blocks then."""

    request_id: str
    transfer_id: str
    producer: EngineAddress


@dataclass(frozen=True, slots=True)
class Receive:
    """Fill a request's blocks with tokens ``[start_token, end_token)``; ``tables[g]`` is group g's block table."""

    request_id: str
    transfer_id: str
    producer: EngineAddress
    prompt_digest: str
    tables: tuple[tuple[int, ...], ...]
    start_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class Release:
    """The request needs nothing from its producer and holds no blocks for it."""

    transfer_id: str
    producer: EngineAddress


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """Orders of one step; each list is in the order of events.

    ``starts`` are requests whose prompts this step or the next one begins to compute. ``discards`` are transfer ids,
    ``lost`` names engines that have ended (``params.names_engine``). ``store`` has the copies of the KV store, if the
    engine has one.
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
    store: StoreOrders | None = None


@dataclass(frozen=True, slots=True)
class EncodedAgentMetadata(KVConnectorHandshakeMetadata):
    """One worker's agent metadata, encoded, on its way to the scheduler's process."""

    agent_metadata: bytes
