"""Parse ``kv_transfer_params``: the request parameters with which a router names a transfer.

The keys are those of public prefill/decode proxies and Tandem's own (docs/protocol.md).

    prefill leg     do_remote_decode=True  [transfer_id] [first_token]
    describe        do_remote_decode=True  describe=True; sends no KV
    discard         do_remote_decode=True  transfer_id  discard=True; sends no KV
    move            do_remote_decode=True  transfer_id  move: id of the request in the engine core
    moved answer    the keys of a prefill answer, and moved=True: remote_num_tokens includes output
    prefill answer  do_remote_prefill=True, do_remote_decode=False, remote_engine_id, remote_host,
                    remote_port, tp_size, transfer_id, remote_request_id, remote_num_tokens
    decode leg      the prefill answer, unchanged; or the same keys from a router that has the
                    engine's address, without remote_num_tokens: the prompt may not be computed yet.
                    With first_token, also prompt_multiple: ``first_token_multiple`` of ``describe``
    lost engines    engines_lost: one remote_engine_id, or a common prefix of several, up to a dot;
                    supervisor: the configured token
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from connectors.errors import WireError

_MAX_CHARACTERS = 256

EMITTED_TOKENS = "tandem_emitted_tokens"
"""Key of vLLM's SamplingParams.extra_args with the ids of output tokens that precede a request."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Side channel address of an engine, and the incarnation expected there."""

    incarnation: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ProduceParams:
    """A prefill leg, whose KV this engine sends, or a request with ``describe``.

    ``transfer_id``  None: this engine generates one for a prefill leg
    ``first_token``  whether to sample the answer's first token: the engine then computes the whole
                     prompt and sends the KV of ``whole_blocks()`` tokens; else of all but the last
    """

    transfer_id: str | None
    describe: bool
    first_token: bool = False


@dataclass(frozen=True, slots=True)
class DiscardParams:
    """Valid before or after the arrival of the transfer's prefill request."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class LostParams:
    """Report that ``engines`` (``names_engine``) write no more; needs the configured token."""

    engines: str
    supervisor: str


@dataclass(frozen=True, slots=True)
class ConsumeParams:
    """A decode leg: this engine receives the request's KV from ``producer``.

    ``computed``         whether the producer has already computed the prompt
    ``prompt_multiple``  argument of ``whole_blocks()`` if the producer samples the first token;
                         else 0
    ``moved``            whether the KV also covers the emitted tokens: the producer ran the request
    """

    transfer_id: str
    producer: EngineAddress
    computed: bool = False
    prompt_multiple: int = 0
    moved: bool = False


@dataclass(frozen=True, slots=True)
class MoveParams:
    """Parameters that end a running request with its next token and send its KV as ``transfer_id``.

    ``supervisor`` as in ``LostParams``.
    """

    request_id: str
    transfer_id: str
    supervisor: str


TransferParams = ProduceParams | DiscardParams | LostParams | MoveParams | ConsumeParams


def parse_params(params: Mapping[str, object] | None) -> TransferParams | None:
    """Return None for a request without a transfer.

    Raises WireError for an invalid or missing value or for keys that exclude each other. A flag
    accepts any value: only its truth counts.
    """
    if not params:
        return None
    if not isinstance(params, Mapping):
        raise WireError(f"kv_transfer_params must be an object, not {type(params).__name__}")
    lost = params.get("engines_lost")
    if lost is not None:
        if not isinstance(lost, str) or not lost.strip(".") or len(lost) > _MAX_CHARACTERS:
            raise WireError(
                f"kv_transfer_params: engines_lost must be an engine id or its prefix, not {reprlib.repr(lost)}"
            )
        return LostParams(lost, _supervisor(params))
    produce, consume = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
    if produce and consume:
        raise WireError("kv_transfer_params: set do_remote_decode or do_remote_prefill, not both")
    transfer_id = params.get("transfer_id")
    if transfer_id is not None and (not isinstance(transfer_id, str) or not 0 < len(transfer_id) <= _MAX_CHARACTERS):
        raise WireError("kv_transfer_params: transfer_id must be a string of 1 to 256 characters")
    if produce and params.get("discard"):
        if transfer_id is None:
            raise WireError("kv_transfer_params: discard needs a transfer_id")
        return DiscardParams(transfer_id)
    if produce and (moving := params.get("move")) is not None:
        if transfer_id is None or not isinstance(moving, str):
            raise WireError("kv_transfer_params: move must be a request id, and needs a transfer_id")
        return MoveParams(moving, transfer_id, _supervisor(params))
    if produce and params.get("describe") and (transfer_id is not None or params.get("first_token")):
        raise WireError("kv_transfer_params: a request with describe sends no KV: remove transfer_id and first_token")
    if produce:
        return ProduceParams(transfer_id, bool(params.get("describe")), bool(params.get("first_token")))
    if not consume:
        return None
    if transfer_id is None:
        raise WireError("kv_transfer_params: transfer_id is missing; send the parameters of prefill's answer unchanged")
    multiple = params.get("prompt_multiple", 0)
    if type(multiple) is not int or multiple < 0:
        raise WireError(
            f"kv_transfer_params: prompt_multiple must be a number of tokens, 0 or more, not {reprlib.repr(multiple)}"
        )
    computed, moved = params.get("remote_num_tokens") is not None, bool(params.get("moved"))
    return ConsumeParams(transfer_id, _address(params), computed, multiple, moved)


def whole_blocks(prompt_tokens: int, multiple: int) -> int:
    """Return the number of prompt tokens whose KV a producer sends if it samples the first token:
    fewer than all, because the consumer computes at least one itself.

    >>> [whole_blocks(tokens, 16) for tokens in (1, 16, 17, 32, 33)]
    [0, 0, 16, 16, 32]
    """
    return (prompt_tokens - 1) // multiple * multiple


def names_engine(engines: str, incarnation: str) -> bool:
    """Return whether ``engines`` is this incarnation's id or a dot-terminated prefix of it."""
    return incarnation == engines or incarnation.startswith(engines.rstrip(".") + ".")


def _supervisor(params: Mapping[str, object]) -> str:
    supervisor = params.get("supervisor", "")
    if not isinstance(supervisor, str):
        raise WireError("kv_transfer_params: supervisor must be a string")
    return supervisor


def _address(params: Mapping[str, object]) -> EngineAddress:
    incarnation, host, port = (params.get(key) for key in ("remote_engine_id", "remote_host", "remote_port"))
    if not isinstance(incarnation, str) or not 0 < len(incarnation) <= _MAX_CHARACTERS:
        raise WireError("kv_transfer_params: remote_engine_id must be the prefill engine's id")
    if not isinstance(host, str) or not 0 < len(host) <= _MAX_CHARACTERS:
        raise WireError("kv_transfer_params: remote_host must be a host name or an IP address")
    if type(port) is not int or not 0 < port < 65536:
        raise WireError(f"kv_transfer_params: remote_port must be a port number, not {reprlib.repr(port)}")
    return EngineAddress(incarnation, host, port)


def prompt_digest(token_ids: Sequence[int] | None, others: Sequence[str] = ()) -> str:
    """Return a digest of inputs that determine a prompt's KV besides the model: 32 hex digits.

    ``others``  inputs outside the token ids, in a fixed order, such as image identities or a salt
    """
    digest = hashlib.blake2b(np.asarray(token_ids or (), "<i8").tobytes(), digest_size=16)
    for other in others:
        digest.update(len(other).to_bytes(8, "little") + other.encode())
    return digest.hexdigest()
