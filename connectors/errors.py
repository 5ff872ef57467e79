"""Exceptions of the connector, and the base class of the actors' exceptions (``actors/errors.py``).

A message states what is wrong, where, and the remedy if there is one. Invalid input from a peer, a
request or a configuration raises one of these classes; ``assert`` checks internal invariants. An
error of a peer can fail a handshake or a transfer; it never ends the engine.
"""


class TandemError(Exception):
    """Base class of all exceptions of the connector, and of those in ``actors/errors.py``."""


class ConfigurationError(TandemError):
    """A setting is invalid or does not fit its engine, or what it names cannot be used.

    For example, NIXL lacks the configured backend, a certificate file has expired, or the process
    of the side channel does not start.
    """


class UnsupportedCacheError(TandemError):
    """The connector does not support a layer of the engine's KV cache, or the engine's parallelism.

    ``layer``   name of the layer; ``*`` stands for all layers
    ``what``    what the connector does not support
    ``remedy``  what the operator can do

    Raised while the engine starts, before it accepts requests.
    """

    def __init__(self, layer: str, what: str, remedy: str) -> None:
        super().__init__(f"layer {layer!r}: {what}; {remedy}")
        self.layer = layer


class PlanError(TandemError):
    """The bytes to copy, to hash or to store cannot be determined.

    For example, a cache layout, a parallel size, a block id, a range of tokens or an object of the
    KV store is invalid, is missing or does not fit the others.
    """


class CoverError(PlanError):
    """Plans miss a requested byte, write a byte twice or write another byte; or rows overlap."""


class IncompatiblePeerError(TandemError):
    """Two engines cannot exchange KV.

    ``field``   property that differs
    ``ours``    its value at the decode engine (the consumer)
    ``theirs``  its value at the prefill engine (the producer)

    The message is valid in the logs of both engines: it names them by their roles.
    """

    def __init__(self, field: str, ours: object, theirs: object, remedy: str) -> None:
        super().__init__(f"{field} differs: the decode engine has {ours!r}, the prefill engine {theirs!r}; {remedy}")
        self.field = field


class WireError(TandemError):
    """A message, agent metadata, a side channel's response or kv_transfer_params are invalid.

    Metadata, messages and responses of another protocol version are invalid, too. The error
    response of a side channel also raises this class, or PeerSecretError if it is about secrets.
    """


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
    """An operation of the transport failed, or the transport has been closed.

    ``peer``  name of the peer's agent in the transport (``?`` if unknown), or of this agent if the
              operation concerns no peer

    A write that raises TransportError, and not FailedWriteError, has posted nothing.
    """

    def __init__(self, peer: str, what: str) -> None:
        super().__init__(f"agent {peer!r}: {what}")
        self.peer = peer


class FailedWriteError(TransportError):
    """A write failed while or after it was posted.

    Parts of the write may still reach the peer's memory while this process lives.
    """


class StoreError(TandemError):
    """An operation of the KV store failed: for example, time or space ran out, or a file is bad.

    After a failed load, the engine computes the tokens whose KV the load did not supply.
    """


class CorruptObjectError(StoreError):
    """A file of the KV store is not the object that its name states, or its bytes have changed."""
