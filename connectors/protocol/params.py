"""``kv_transfer_params``: the request parameters with which a router names a transfer to the two engines.

These are the keys that public prefill/decode proxies use, plus ``transfer_id``, with which a router can send both legs
at once, ``describe``, which requests an engine's address, ``discard``, which cancels a transfer, and ``engines_lost``,
a supervisor's report that engines have ended.

    prefill leg   do_remote_decode=True  [transfer_id] [describe]
    discard       do_remote_decode=True  transfer_id  discard=True; nothing is computed for it
    its answer    do_remote_prefill=True, remote_engine_id, remote_host, remote_port, tp_size, transfer_id, ...
    decode leg    the answer, unchanged; or the same keys made by a router that knows the engine's address, but for
                  remote_num_tokens: it says that the prompt has been computed
    lost          engines_lost: a remote_engine_id, or the beginning of several up to a dot: their processes write no
                  more; supervisor: what shows that it is the supervisor who says so
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from connectors.errors import WireError


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Side channel address of one start of an engine, and the id of that start."""

    incarnation: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ProduceParams:
    """Prefill the request here for a consumer on another engine. Without an id the producer creates one."""

    transfer_id: str | None
    describe: bool


@dataclass(frozen=True, slots=True)
class DiscardParams:
    """No engine will fetch this transfer's KV, whether its request has arrived or not."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class LostParams:
    """Every engine start that ``engines`` names (``names_engine``) has ended and writes no more.

    Valid only if ``supervisor`` matches the connector's configuration.
    """

    engines: str
    supervisor: str


@dataclass(frozen=True, slots=True)
class ConsumeParams:
    """Receive the request's KV from the engine at ``producer``. ``computed`` if that engine has already computed it."""

    transfer_id: str
    producer: EngineAddress
    computed: bool = False


TransferParams = ProduceParams | DiscardParams | LostParams | ConsumeParams


def parse_params(params: Mapping[str, object] | None) -> TransferParams | None:
    """Return None for a request without a transfer. Raises WireError that names the invalid key."""
    if not params:
        return None
    if not isinstance(params, Mapping):
        raise WireError(f"kv_transfer_params must be an object, not {type(params).__name__}")
    lost = params.get("engines_lost")
    if lost is not None:
        if not isinstance(lost, str) or not lost.strip("."):
            raise WireError(f"kv_transfer_params: engines_lost must name engines by how their ids begin, not {lost!r}")
        supervisor = params.get("supervisor", "")
        if not isinstance(supervisor, str):
            raise WireError("kv_transfer_params: supervisor must be text")
        return LostParams(lost, supervisor)
    produce, consume = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
    if produce and consume:
        raise WireError("kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other")
    transfer_id = params.get("transfer_id")
    if transfer_id is not None and (not isinstance(transfer_id, str) or not 0 < len(transfer_id) <= 256):
        raise WireError("kv_transfer_params: transfer_id must be text of 1 to 256 characters")
    if produce and params.get("discard"):
        if transfer_id is None:
            raise WireError("kv_transfer_params: discard needs the transfer_id that is given up")
        return DiscardParams(transfer_id)
    if produce:
        return ProduceParams(transfer_id, bool(params.get("describe")))
    if not consume:
        return None
    if transfer_id is None:
        raise WireError("kv_transfer_params: transfer_id is missing; pass the prefill answer's parameters on unchanged")
    return ConsumeParams(transfer_id, _address(params), params.get("remote_num_tokens") is not None)


def names_engine(engines: str, incarnation: str) -> bool:
    """Return whether ``engines`` is this engine start's id, or a prefix of it that ends before or with a dot."""
    return incarnation == engines or incarnation.startswith(engines.rstrip(".") + ".")


def _address(params: Mapping[str, object]) -> EngineAddress:
    incarnation, host, port = (params.get(key) for key in ("remote_engine_id", "remote_host", "remote_port"))
    if not isinstance(incarnation, str) or not incarnation:
        raise WireError("kv_transfer_params: remote_engine_id must name the prefill engine's start")
    if not isinstance(host, str) or not host:
        raise WireError("kv_transfer_params: remote_host must be a host name or address")
    if type(port) is not int or not 0 < port < 65536:
        raise WireError(f"kv_transfer_params: remote_port must be a port number, not {port!r}")
    return EngineAddress(incarnation, host, port)


def prompt_digest(token_ids: Sequence[int] | None, others: Sequence[str] = ()) -> str:
    """Return a digest of everything besides the model that a prompt's KV depends on.

    ``others`` are inputs that token ids do not contain: identities of images, a LoRA adapter, a cache salt.
    """
    digest = hashlib.blake2b(np.asarray(token_ids or (), "<i8").tobytes(), digest_size=16)
    for other in others:
        digest.update(len(other).to_bytes(8, "little") + other.encode())
    return digest.hexdigest()
