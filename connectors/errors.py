"""Exceptions of the connector, and the base class of the actors' exceptions (``actors/errors.py``).

A message states what is wrong, where, and the remedy if there is one. Invalid input of a peer, a
request or a configuration raises one of these; ``assert`` checks internal invariants. An error of a
peer can fail a handshake or a transfer; it never ends the engine.
"""


class TandemError(Exception):
    """Base class, also of the exceptions in ``actors/errors.py``."""


class ConfigurationError(TandemError):
    """A setting is invalid or does not fit its engine, or what it names cannot be used."""


class UnsupportedCacheError(TandemError):
    """The connector does not support a layer of the KV cache (``*``: all), or the parallelism."""

    def __init__(self, layer: str, what: str, remedy: str = "serve this model without Tandem's connector") -> None:
        super().__init__(f"layer {layer!r}: {what}; {remedy}")
        self.layer = layer


class PlanError(TandemError):
    """The bytes to copy, to hash or to store cannot be determined: values contradict each other."""


class CoverError(PlanError):
    """Plans miss a requested byte, write a byte twice or write another byte; or rows overlap."""


class IncompatiblePeerError(TandemError):
    """Two engines cannot exchange KV. The message, valid in the logs of both, names their roles.

    ``ours``    value of the decode engine (the consumer)
    ``theirs``  value of the prefill engine (the producer)
    """

    def __init__(self, field: str, ours: object, theirs: object, remedy: str) -> None:
        super().__init__(f"{field} differs: the decode engine has {ours!r}, the prefill engine {theirs!r}; {remedy}")
        self.field = field


class WireError(TandemError):
    """A message, metadata, a response or kv_transfer_params are invalid or of another version."""


class HandshakeError(TandemError):
    """A handshake or a side channel request failed, for example by a timeout or a refusal."""


class PeerSecretError(HandshakeError):
    """The secrets of two engines differ, or only one engine has a secret."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where}: {what}; set the same transfer.secret (kv_connector_extra_config: secret) on both engines"
        )


class StaleReferenceError(HandshakeError):
    """Another engine, or another incarnation of the engine, answers at the requested address."""


class TransportError(TandemError):
    """An operation of the transport failed; ``peer`` is the peer's agent (``?``: unknown), or this.
    A write that raises it, and not FailedWriteError, has posted nothing.
    """

    def __init__(self, peer: str, what: str) -> None:
        super().__init__(f"agent {peer!r}: {what}")
        self.peer = peer


class FailedWriteError(TransportError):
    """A write failed while or after it was posted: parts may still reach the peer's memory."""


class StoreError(TandemError):
    """An operation of the KV store failed: for example, time or space ran out, or a file is bad."""


class CorruptObjectError(StoreError):
    """A file of the KV store is not the object that its name states, or its bytes have changed."""
