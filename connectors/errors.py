"""Exceptions that Tandem raises.

Every message states what is wrong, where, and the remedy. Invalid input from a peer or a
configuration file raises one of these classes; ``assert`` checks internal invariants. The connector
turns a peer's error into a failed transfer and never ends the engine.
"""


class TandemError(Exception):
    """Base class of all exceptions that Tandem defines."""


class ConfigurationError(TandemError):
    """A setting is unknown, out of range, or does not fit its engine."""


class UnsupportedCacheError(TandemError):
    """The connector cannot map a layer of this engine's KV cache.

    Raised while the engine starts, before it accepts requests.
    """

    def __init__(self, layer: str, what: str, remedy: str) -> None:
        super().__init__(f"layer {layer!r}: {what}; {remedy}")
        self.layer = layer


class PlanError(TandemError):
    """A transfer cannot be planned: its block ids or shapes do not describe the requested bytes."""


class CoverError(PlanError):
    """A plan would miss bytes, write bytes twice, or write bytes outside the destination."""


class IncompatiblePeerError(TandemError):
    """Two engines cannot exchange KV. ``field`` is the property that differs."""

    def __init__(self, field: str, ours: object, theirs: object, remedy: str) -> None:
        super().__init__(f"{field} differs: this engine has {ours!r}, the peer {theirs!r}; {remedy}")
        self.field = field


class WireError(TandemError):
    """A peer's message, its agent metadata or a request's kv_transfer_params are invalid."""


class HandshakeError(TandemError):
    """The first contact with an engine failed: no answer in time, or a refusal."""


class PeerSecretError(HandshakeError):
    """The secrets of two engines differ, or only one engine has a secret."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where}: {what}; set the same transfer.secret (kv_connector_extra_config: secret) on both engines"
        )


class StaleReferenceError(HandshakeError):
    """Another incarnation of the engine answers at this address; the requested one has ended."""


class TransportError(TandemError):
    """The transport could not send bytes or a message to a peer.

    ``peer``  name of the peer in the transport

    A write that raises TransportError, and not FailedWriteError, has posted nothing.
    """

    def __init__(self, peer: str, what: str) -> None:
        super().__init__(f"peer {peer!r}: {what}")
        self.peer = peer


class FailedWriteError(TransportError):
    """A write failed after its start.

    Parts of the write may reach the peer's memory while this process lives.
    """


class StoreError(TandemError):
    """The KV store ran out of time or space. The engine computes the request's tokens instead."""


class CorruptObjectError(StoreError):
    """A stored object does not match its name, or its bytes have changed."""
