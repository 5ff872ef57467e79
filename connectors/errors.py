"""The error tree. Every error says what is wrong, where, and what to do about it.

Input that comes from a peer or from a configuration file raises one of these; ``assert`` is left for our own
invariants. The connector turns a peer's error into a failed transfer, never into a dead engine.
"""


class TandemError(Exception):
    """Base of everything that Tandem raises on purpose."""


class ConfigurationError(TandemError):
    """A setting is unknown, out of range, or does not fit the engine that it was given to."""


class UnsupportedCacheError(TandemError):
    """The engine holds a KV cache whose bytes this connector cannot map.

    Raised while the engine starts, before any request is accepted.
    """

    def __init__(self, layer: str, what: str, remedy: str) -> None:
        super().__init__(f"layer {layer!r}: {what}; {remedy}")
        self.layer = layer


class PlanError(TandemError):
    """A transfer cannot be planned: block ids or shapes do not describe the bytes that are wanted."""


class CoverError(PlanError):
    """A plan would miss bytes, write some twice, or write bytes that nobody wants."""


class IncompatiblePeerError(TandemError):
    """Two engines cannot exchange KV. ``field`` names what differs."""

    def __init__(self, field: str, ours: object, theirs: object, remedy: str) -> None:
        super().__init__(f"{field} differs: this engine has {ours!r}, the peer {theirs!r}; {remedy}")
        self.field = field


class WireError(TandemError):
    """A message or agent metadata from a peer is malformed, truncated, or of another protocol version."""


class HandshakeError(TandemError):
    """The first contact with an engine failed: it did not answer in time, or it refused."""


class PeerSecretError(HandshakeError):
    """The two engines do not have the same secret, or only one of them has any."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where}: {what}; set the same transfer.secret (kv_connector_extra_config: secret) on both engines"
        )


class StaleReferenceError(HandshakeError):
    """Another engine start answers where the one we were sent to used to be: that one is gone."""


class TransportError(TandemError):
    """Moving bytes or a message to a peer failed. ``peer`` is the transport's name for it.

    Of a write that was to be posted, nothing was.
    """

    def __init__(self, peer: str, what: str) -> None:
        super().__init__(f"peer {peer!r}: {what}")
        self.peer = peer


class FailedWriteError(TransportError):
    """A write failed after its start. Parts of it may reach the peer's memory while this process lives."""


class StoreError(TandemError):
    """The KV store could not do something in time or for want of room. The request computes its tokens instead."""


class CorruptObjectError(StoreError):
    """A stored object is not what its name says, or its bytes have changed."""
