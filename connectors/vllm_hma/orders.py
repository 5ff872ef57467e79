"""Messages from the connector's scheduler side to its worker side, one ``Orders`` per step;
``EncodedAgentMetadata`` goes the other way, once, when the engine starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from connectors.protocol.params import EngineAddress
from connectors.vllm_hma.kv_store.orders import StoreOrders
from connectors.vllm_hma.model.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Expect:
    """New prefill request, whose KV this engine sends.

    ``prompt_digest``  without ``adapter``: each worker adds its identity (``adapter_claims.py``)
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
    ``computed_tokens``  number of tokens from the prompt's start that have KV after this step
    ``last``             whether ``computed_tokens`` reaches ``prompt_tokens`` of ``Expect``
    """

    request_id: str
    new_ids: tuple[tuple[int, ...], ...]
    computed_tokens: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a prefill request with a transfer, or, by ``reset_cache``, of its transfer alone.

    ``held``  whether vLLM keeps the request's blocks until all ranks have reported ``Sent``; else
              ``reason`` states why this engine does not send the KV
    """

    request_id: str
    held: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Queue:
    """Decode request that waits, without blocks, until its producer is to start the prompt."""

    request_id: str
    transfer_id: str
    producer: EngineAddress


@dataclass(frozen=True, slots=True)
class Receive:
    """Fill a decode request's blocks with the KV of tokens ``[start_token, end_token)``.

    ``tables``        block table of each group
    ``loaded_token``  position before which the KV store supplies full attention, from
                      ``start_token`` on; the transfer supplies the rest
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
    """Cancel the transfer of a decode request that needs no KV and has offered no blocks."""

    transfer_id: str
    producer: EngineAddress


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """Orders of one step; each list is in the order of events.

    ``starts``     ids of prefill requests whose prompts start in this step or may start in the next
    ``preempted``  ids of preempted prefill requests with a transfer
    ``aborts``     ids of decode requests that have ended during their transfer
    ``discards``   ids of transfers whose KV no engine will fetch
    ``lost``       ids of ended engines, or common prefixes of such ids (``params.names_engine``)
    ``report``     whether workers report this step even without changes, so that vLLM calls
                   ``update_connector_output``, which checks whether delayed requests fit. True
                   while blocks are in quarantine or a request is delayed (``failed_loads.py``)
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
    agent_metadata: bytes
