"""Describe each worker to its peers (agent metadata) and check that two engines match."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass

from connectors.errors import IncompatiblePeerError, WireError
from connectors.planning.layout import EngineLayout
from connectors.planning.plan import check_compatible, compared

PROTOCOL_VERSION = 9


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Properties that must be equal for two engines to exchange KV; layouts may differ.

    ``model``           digest of the model's configuration and of a string that identifies its
                        weights (``weights_identity``). For a hub model without a known commit, and
                        for object storage, equal strings do not prove equal weights
    ``cache_dtype``     dtype of the KV cache, never ``auto``
    ``engine_version``  version of vLLM
    ``draft``           digest of the speculative method and its draft model; empty without KV of
                        drafts
    """

    model: str
    dtype: str
    cache_dtype: str
    engine_version: str
    draft: str = ""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of a process, for liveness checks by other processes (``handshake/processes.py``).

    ``host``        boot id of the kernel, and the namespaces in which ``pid`` and ``started_at``
                    are valid; empty if unknown
    ``started_at``  start time in clock ticks since boot
    """

    host: str = ""
    pid: int = 0
    started_at: int = 0


NO_PROCESS = ProcessIdentity()


@dataclass(frozen=True, slots=True)
class AgentMetadata:
    """Description of one worker and its agent in the transport.

    ``incarnation``  id of this start of the engine
    ``process``      process that posts this worker's writes
    """

    incarnation: str
    identity: ModelIdentity
    layout: EngineLayout
    transport: str
    transport_metadata: bytes
    process: ProcessIdentity = NO_PROCESS

    @property
    def rank(self) -> int:
        return self.layout.tp_rank


@dataclass(frozen=True, slots=True)
class EngineMetadata:
    """Agent metadata of all workers of one incarnation, by rank."""

    incarnation: str
    workers: tuple[AgentMetadata, ...]


def engine_identity(engine: EngineMetadata, key: bytes = b"") -> str:
    """Digest of all that must be equal on two engines that exchange KV: 32 hexadecimal digits.

    ``key``  derived from the secret of the engines

    Only block sizes that ``check_compatible`` refuses in one direction are not part of it.
    """
    workers = {
        json.dumps([worker.transport, *astuple(worker.identity), *(each[:2] for each in compared(worker.layout))])
        for worker in engine.workers
    }
    whole = json.dumps([PROTOCOL_VERSION, *sorted(workers)])
    return hashlib.blake2b(whole.encode(), digest_size=16, key=key).hexdigest()


def check_peers(producer: AgentMetadata, consumer: AgentMetadata) -> None:
    """Raise IncompatiblePeerError with the first difference that prevents a correct transfer."""
    if producer.transport != consumer.transport:
        raise IncompatiblePeerError(
            "transport", consumer.transport, producer.transport, "run the same Tandem release on both sides"
        )
    for field, remedy in (
        ("model", "serve the same model on both engines"),
        ("dtype", "start both engines with the same dtype"),
        ("cache_dtype", "start both engines with the same kv_cache_dtype"),
        ("engine_version", "run the same vLLM release on both sides"),
        (
            "draft",
            "set the same method and model in speculative_config of both engines, or use a method whose drafts have "
            "no KV (ngram)",
        ),
    ):
        ours, theirs = getattr(consumer.identity, field), getattr(producer.identity, field)
        if ours != theirs:
            raise IncompatiblePeerError(field, ours, theirs, remedy)
    check_compatible(producer.layout, consumer.layout)


def engine_metadata(workers: dict[int, AgentMetadata]) -> EngineMetadata:
    """Raises WireError unless the workers are all ranks of one engine, with the same layers."""
    rank_metadata = tuple(workers[rank] for rank in sorted(workers))
    if not rank_metadata or sorted(workers) != list(range(len(rank_metadata))):
        raise WireError(f"the workers' ranks must be 0, 1, 2, ... without gaps, not {sorted(workers)}")
    if len({agent_metadata.incarnation for agent_metadata in rank_metadata}) != 1:
        raise WireError("the workers' agent metadata is of more than one incarnation")
    for rank, agent_metadata in enumerate(rank_metadata):
        layout, first = agent_metadata.layout, rank_metadata[0].layout
        if (layout.tp_rank, layout.tp_size) != (rank, len(rank_metadata)):
            raise WireError(
                f"the agent metadata of rank {rank} of {len(rank_metadata)} describes rank {layout.tp_rank} of "
                f"{layout.tp_size}"
            )
        if [[*group.parts] for group in layout.groups] != [[*group.parts] for group in first.groups]:
            raise WireError(f"the agent metadata of rank {rank} describes other layers than that of rank 0")
    return EngineMetadata(rank_metadata[0].incarnation, rank_metadata)
