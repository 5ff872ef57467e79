"""Agent metadata: a description of each worker that engines exchange before any transfer, and the check that two match.

Agent metadata describes one worker and its NIXL agent; engine metadata is that of all workers of one engine start. It
travels as JSON: a pair reads it once, and a person who debugs a refusal wants to read it.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from typing import Any, TypeVar

from connectors.errors import IncompatiblePeerError, PlanError, WireError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.planning.plan import check_compatible

PROTOCOL_VERSION = 5
_MOST = 4096
MAX_METADATA_BYTES = 16 * 2**20
_MOST_ROWS = 2**20

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Properties besides the layout that must be equal for two engines to share KV.

    ``model`` is a digest of the model's weights and configuration rather than its path, which may differ between
    hosts. ``cache_dtype`` is the dtype of the KV cache, ``engine_version`` that of vLLM.
    """

    model: str
    dtype: str
    cache_dtype: str
    engine_version: str


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Kernel's identity of a process, with which others can check whether it is alive.

    ``host`` names the boot of a kernel and the namespaces in which ``pid`` and ``started_at`` (clock ticks since that
    boot) are counted. It is empty if unknown.
    """

    host: str = ""
    pid: int = 0
    started_at: int = 0


NO_PROCESS = ProcessIdentity()


@dataclass(frozen=True, slots=True)
class AgentMetadata:
    """Identity of one worker, layout of its cache, and the transport metadata that peers need to reach it.

    ``process`` is the process that posts the writes.
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
    """All workers of one engine, by rank."""

    incarnation: str
    workers: tuple[AgentMetadata, ...]

    @property
    def tp_size(self) -> int:
        return len(self.workers)


def check_peers(producer: AgentMetadata, consumer: AgentMetadata) -> None:
    """Raise IncompatiblePeerError, naming the first difference, unless the producer's KV fits the consumer."""
    if producer.transport != consumer.transport:
        raise IncompatiblePeerError(
            "transport", consumer.transport, producer.transport, "configure the same transport on both engines"
        )
    for field, remedy in (
        ("model", "serve the same model on both engines"),
        ("dtype", "start both engines with the same dtype"),
        ("cache_dtype", "start both engines with the same kv_cache_dtype"),
        ("engine_version", "run the same vLLM release on both sides"),
    ):
        ours, theirs = getattr(consumer.identity, field), getattr(producer.identity, field)
        if ours != theirs:
            raise IncompatiblePeerError(field, ours, theirs, remedy)
    check_compatible(producer.layout, consumer.layout)


def encode_agent_metadata(agent_metadata: AgentMetadata) -> bytes:
    fields = asdict(agent_metadata)
    fields["transport_metadata"] = base64.b64encode(agent_metadata.transport_metadata).decode()
    return json.dumps({"version": PROTOCOL_VERSION, "worker": fields}, separators=(",", ":")).encode()


def decode_agent_metadata(payload: bytes) -> AgentMetadata:
    """Raises WireError for anything that is not agent metadata of this protocol version."""
    if len(payload) > MAX_METADATA_BYTES:
        raise WireError(f"agent metadata of {len(payload)} bytes; at most {MAX_METADATA_BYTES} are read")
    try:
        document = json.loads(payload)
        if document["version"] != PROTOCOL_VERSION:
            raise WireError(
                f"the peer's metadata has protocol version {document['version']!r}, this engine {PROTOCOL_VERSION}; "
                "run the same Tandem release on both sides"
            )
        fields = document["worker"]
        return AgentMetadata(
            incarnation=_text(fields["incarnation"]),
            identity=ModelIdentity(**{key: _text(value) for key, value in fields["identity"].items()}),
            layout=_layout(fields["layout"]),
            transport=_text(fields["transport"]),
            transport_metadata=base64.b64decode(fields["transport_metadata"], validate=True),
            process=_checked(ProcessIdentity, fields["process"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, PlanError, RecursionError) as error:
        raise WireError(f"malformed agent metadata: {error}") from error


def engine_metadata(workers: dict[int, AgentMetadata]) -> EngineMetadata:
    """Combine the metadata of all workers. Raises WireError unless they are all ranks of one engine start."""
    rank_metadata = tuple(workers[rank] for rank in sorted(workers))
    if not rank_metadata or sorted(workers) != list(range(len(rank_metadata))):
        raise WireError(f"an engine's agent metadata must be ranks 0..n-1, got {sorted(workers)}")
    if len({agent_metadata.incarnation for agent_metadata in rank_metadata}) != 1:
        raise WireError("an engine's agent metadata must all be of one incarnation")
    for rank, agent_metadata in enumerate(rank_metadata):
        if (agent_metadata.layout.tp_rank, agent_metadata.layout.tp_size) != (rank, len(rank_metadata)):
            raise WireError(
                f"metadata {rank} is of rank {agent_metadata.layout.tp_rank} of {agent_metadata.layout.tp_size}"
            )
    return EngineMetadata(rank_metadata[0].incarnation, rank_metadata)


def _layout(fields: dict[str, Any]) -> EngineLayout:
    return EngineLayout(
        tp_rank=_whole(fields["tp_rank"]),
        tp_size=_few(fields["tp_size"]),
        num_blocks=_whole(fields["num_blocks"]),
        caches_prefixes=_flag(fields["caches_prefixes"]),
        regions=tuple(
            Region(_whole(r["address"]), _whole(r["length_bytes"]), _checked(MemoryKind, r["memory_kind"]))
            for r in fields["regions"]
        ),
        groups=tuple(
            Group(
                index=_whole(group["index"]),
                kind=GroupKind(group["kind"]),
                block_tokens=_whole(group["block_tokens"]),
                window_tokens=None if group["window_tokens"] is None else _whole(group["window_tokens"]),
                layers=tuple(_pages(pages) for pages in group["layers"]),
            )
            for group in fields["groups"]
        ),
    )


def _pages(fields: dict[str, Any]) -> LayerPages:
    pages = _checked(LayerPages, fields)
    if max(pages.kernel_blocks, pages.rows, pages.heads, pages.stripes) > _MOST_ROWS:
        raise WireError(
            f"layer {pages.layer!r} is described by more than {_MOST_ROWS} rows, stripes, heads or kernel blocks"
        )
    return pages


def _checked(kind: type[_T], values: dict[str, Any]) -> _T:
    """Build a dataclass whose fields are all text or whole numbers, refusing anything else."""
    built = kind(**values)
    for field in fields_of(kind):  # type: ignore[arg-type]
        value = getattr(built, field.name)
        _text(value, field.name) if field.type == "str" else _whole(value, field.name)
    return built


def _whole(value: object, key: str = "a number") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise WireError(f"{key} must be a whole number of at most 63 bits, not {value!r}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"expected true or false, not {value!r}")
    return value


def _few(value: object) -> int:
    """Limit a number that planning counts up to, so that a peer cannot make this engine loop for long."""
    if _whole(value) > _MOST:
        raise WireError(f"a number of ranks or heads is {value!r}; at most {_MOST} can be planned for")
    return _whole(value)


def _text(value: object, key: str = "a field") -> str:
    if not isinstance(value, str):
        raise WireError(f"{key} must be text, not {value!r}")
    return value
