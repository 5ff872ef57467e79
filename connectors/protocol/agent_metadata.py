"""Describe each worker to its peers (agent metadata) and check that two engines match.

Agent metadata describes one worker and its agent in the transport (NIXL). Engine metadata is the
agent metadata of all workers of one incarnation. The encoding is JSON: engines exchange metadata
only in handshakes, so its size matters little, and operators can read it to debug a refusal.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, astuple, dataclass
from dataclasses import fields as fields_of
from typing import Any, TypeVar

from connectors.errors import IncompatiblePeerError, PlanError, WireError
from connectors.planning.grid import Shard
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.planning.plan import check_compatible

PROTOCOL_VERSION = 8
_MOST = 4096
MAX_METADATA_BYTES = 16 * 2**20
_MOST_ROWS = 2**20
_MOST_BLOCK_TOKENS = 2**24
_MOST_INTERLEAVED = 2**16

_AXES = ("pp_rank", "pp_size", "pcp_rank", "pcp_size", "dcp_size", "interleave_tokens")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Properties that must be equal for two engines to exchange KV; layouts may differ.

    ``model``           digest of the model's configuration and of a string that identifies its
                        weights (``weights_identity``). For a hub model without a known commit, and
                        for object storage, equal strings do not prove equal weights
    ``dtype``           dtype of the model
    ``cache_dtype``     dtype of the KV cache, never ``auto``
    ``engine_version``  version of vLLM
    ``draft``           digest of the speculative method and its draft model, if the cache also has
                        KV of drafts; else empty
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
    ``pid``         process id
    ``started_at``  start time in clock ticks since boot
    """

    host: str = ""
    pid: int = 0
    started_at: int = 0


NO_PROCESS = ProcessIdentity()


@dataclass(frozen=True, slots=True)
class AgentMetadata:
    """Description of one worker.

    ``incarnation``         id of this start of the engine
    ``identity``            properties that must equal the peer's
    ``layout``              layout of the KV cache
    ``transport``           kind of the transport (``Transport.kind``)
    ``transport_metadata``  data with which a peer's transport reaches this worker
    ``process``             process that posts this worker's writes
    """

    incarnation: str
    identity: ModelIdentity
    layout: EngineLayout
    transport: str
    transport_metadata: bytes
    process: ProcessIdentity = NO_PROCESS

    @property
    def rank(self) -> int:
        return self.layout.rank


@dataclass(frozen=True, slots=True)
class EngineMetadata:
    """Agent metadata of all workers of one incarnation, by rank."""

    incarnation: str
    workers: tuple[AgentMetadata, ...]


def engine_identity(engine: EngineMetadata) -> str:
    """Return a digest of what ``check_peers`` compares besides layouts: 32 hexadecimal digits.

    Equal for engines with the same model, dtypes and releases, whatever their parallel sizes. An
    engine whose workers differ has a digest that no other kind of engine has.
    """
    workers = {json.dumps([worker.transport, *astuple(worker.identity)]) for worker in engine.workers}
    return hashlib.blake2b(json.dumps([PROTOCOL_VERSION, *sorted(workers)]).encode(), digest_size=16).hexdigest()


def check_peers(producer: AgentMetadata, consumer: AgentMetadata) -> None:
    """Raise IncompatiblePeerError with the first difference that prevents a correct transfer.

    This function compares transport, identity and layout.
    """
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


def encode_agent_metadata(agent_metadata: AgentMetadata) -> bytes:
    """Return agent metadata as JSON, with the protocol version."""
    fields = asdict(agent_metadata)
    fields["transport_metadata"] = base64.b64encode(agent_metadata.transport_metadata).decode()
    return json.dumps({"version": PROTOCOL_VERSION, "worker": fields}, separators=(",", ":")).encode()


def decode_agent_metadata(payload: bytes) -> AgentMetadata:
    """Parse agent metadata.

    Raises WireError if it is malformed, too large or of another protocol version.
    """
    if len(payload) > MAX_METADATA_BYTES:
        raise WireError(f"agent metadata has {len(payload)} bytes; the limit is {MAX_METADATA_BYTES}")
    try:
        document = json.loads(payload)
        if document["version"] != PROTOCOL_VERSION:
            raise WireError(
                f"the peer's metadata has protocol version {document['version']!r}, this engine {PROTOCOL_VERSION}; "
                "run the same Tandem release on both sides"
            )
        fields = document["worker"]
        return AgentMetadata(
            incarnation=_text(fields["incarnation"], "incarnation"),
            identity=ModelIdentity(**{key: _text(value, key) for key, value in fields["identity"].items()}),
            layout=_layout(fields["layout"]),
            transport=_text(fields["transport"], "transport"),
            transport_metadata=base64.b64decode(fields["transport_metadata"], validate=True),
            process=_checked(ProcessIdentity, fields["process"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, PlanError, RecursionError) as error:
        raise WireError(f"malformed agent metadata: {error}") from error


def engine_metadata(workers: dict[int, AgentMetadata]) -> EngineMetadata:
    """Combine the agent metadata of all n workers of an engine, by rank.

    Raises WireError unless the workers are ranks 0 to n-1 of one incarnation, with equal parallel
    sizes and the same layers of the model in each group.
    """
    rank_metadata = tuple(workers[rank] for rank in sorted(workers))
    if not rank_metadata or sorted(workers) != list(range(len(rank_metadata))):
        raise WireError(f"the workers' ranks must be 0, 1, 2, ... without gaps, not {sorted(workers)}")
    if len({agent_metadata.incarnation for agent_metadata in rank_metadata}) != 1:
        raise WireError("the workers' agent metadata is of more than one incarnation")
    for rank, agent_metadata in enumerate(rank_metadata):
        layout, first = agent_metadata.layout, rank_metadata[0].layout
        if (layout.rank, layout.grid.size) != (rank, len(rank_metadata)):
            raise WireError(
                f"the agent metadata of rank {rank} of {len(rank_metadata)} describes rank {layout.rank} of "
                f"{layout.grid.size}"
            )
        if layout.grid != first.grid or [g.model_layers for g in layout.groups] != [
            g.model_layers for g in first.groups
        ]:
            raise WireError(
                f"the agent metadata of rank {rank} describes other parallel sizes or other layers than that of rank 0"
            )
    return EngineMetadata(rank_metadata[0].incarnation, rank_metadata)


def _layout(fields: dict[str, Any]) -> EngineLayout:
    axes = {key: _few(fields[key], key) for key in _AXES}
    _few(_few(fields["tp_size"], "tp_size") * axes["pp_size"] * axes["pcp_size"], "the number of ranks")
    if axes["dcp_size"] * axes["interleave_tokens"] > _MOST_INTERLEAVED:
        raise WireError(f"agent metadata: dcp_size * interleave_tokens exceeds the limit of {_MOST_INTERLEAVED}")
    return EngineLayout(
        tp_rank=_whole(fields["tp_rank"], "tp_rank"),
        tp_size=_few(fields["tp_size"], "tp_size"),
        num_blocks=_whole(fields["num_blocks"], "num_blocks"),
        caches_prefixes=_flag(fields["caches_prefixes"]),
        **axes,
        regions=tuple(
            Region(
                _whole(r["address"], "address"),
                _whole(r["length_bytes"], "length_bytes"),
                _checked(MemoryKind, r["memory_kind"]),
            )
            for r in fields["regions"]
        ),
        groups=tuple(
            Group(
                index=_whole(group["index"], "index"),
                kind=GroupKind(group["kind"]),
                block_tokens=_block_tokens(group["block_tokens"]),
                window_tokens=None
                if group["window_tokens"] is None
                else _whole(group["window_tokens"], "window_tokens"),
                layers=tuple(_pages(pages) for pages in group["layers"]),
                shard=_checked(Shard, group["shard"]),
                stages=tuple(tuple(_text(layer, "a layer") for layer in stage) for stage in group["stages"]),
            )
            for group in fields["groups"]
        ),
    )


def _pages(fields: dict[str, Any]) -> LayerPages:
    pages = _checked(LayerPages, fields)
    if max(pages.kernel_blocks, pages.rows, pages.heads, pages.stripes) > _MOST_ROWS:
        raise WireError(
            f"agent metadata: layer {pages.layer!r} has more than {_MOST_ROWS} rows, stripes, heads or kernel blocks"
        )
    return pages


def _checked(kind: type[_T], values: dict[str, Any]) -> _T:
    """Build a dataclass of strings and whole numbers.

    Raises WireError for other values, TypeError for unknown or missing fields, and the errors of
    the class itself, for example PlanError.
    """
    built = kind(**values)
    for field in fields_of(kind):  # type: ignore[arg-type]
        value = getattr(built, field.name)
        _text(value, field.name) if field.type == "str" else _whole(value, field.name)
    return built


def _whole(value: object, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise WireError(f"agent metadata: {key} must be an integer from 0 to 2**63 - 1, not {value!r}")
    return value


def _block_tokens(value: object) -> int:
    if _whole(value, "block_tokens") > _MOST_BLOCK_TOKENS:
        raise WireError(f"agent metadata: a block has {value!r} tokens; the limit is {_MOST_BLOCK_TOKENS}")
    return _whole(value, "block_tokens")


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"agent metadata: caches_prefixes must be true or false, not {value!r}")
    return value


def _few(value: object, key: str) -> int:
    """Return ``value``: a rank, a number of ranks, or an interleave.

    Raises WireError unless it is an integer from 0 to ``_MOST``.
    """
    if _whole(value, key) > _MOST:
        raise WireError(f"agent metadata: {key} is {value!r}; the limit is {_MOST}")
    return _whole(value, key)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise WireError(f"agent metadata: {key} must be a string, not {value!r}")
    return value
