"""``kv_transfer_params``: how a router names a transfer to the two engines.

These are the keys that public prefill/decode proxies pass around, plus ``transfer_id``, with which both legs can be
sent at once, ``describe``, which asks an engine for its address, ``discard``, which gives up a transfer, and
``engines_lost``, a supervisor's word that engines have ended.

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
    """Where to shake hands with an engine start, and which start it must be."""

    incarnation: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ProduceParams:
    """The request is to be prefilled here for a consumer elsewhere. Without an id the producer makes one."""

    transfer_id: str | None
    describe: bool


@dataclass(frozen=True, slots=True)
class DiscardParams:
    """Nobody will fetch this transfer's KV, whether its request is here already or not."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class LostParams:
    """Every engine start that ``engines`` names (``names_engine``) has ended: nothing of it writes any more.

    Whoever says so must be believed on no other ground than ``supervisor``.
    """

    engines: str
    supervisor: str


@dataclass(frozen=True, slots=True)
class ConsumeParams:
    """The request's KV comes from the engine at ``producer``, which has ``computed`` it, or has yet to."""

    transfer_id: str
    producer: EngineAddress
    computed: bool = False


TransferParams = ProduceParams | DiscardParams | LostParams | ConsumeParams


def parse_params(params: Mapping[str, object] | None) -> TransferParams | None:
    """None where the request has nothing to do with another engine. Raises WireError naming the key that is wrong."""
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
    """Whether ``engines`` is the engine start's id, or the beginning of it that ends before or with a dot."""
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
    """A short digest of all that a prompt's KV depends on, besides the model.

    ``others`` are what token ids do not say: the identities of images and the like, a LoRA adapter, a cache salt.
    """
    digest = hashlib.blake2b(np.asarray(token_ids or (), "<i8").tobytes(), digest_size=16)
    for other in others:
        digest.update(len(other).to_bytes(8, "little") + other.encode())
    return digest.hexdigest()
