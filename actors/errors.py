"""Errors of requests and engines."""

from connectors.errors import TandemError


class OverloadedError(TandemError):
    """More requests are served, or wait for a role's replicas, than the settings allow."""


class UnavailableError(TandemError):
    """No replica of a role can answer: none is running, or the replica has died."""


class RefusedError(TandemError):
    """The engine accepts no more calls, for now or for good. Another engine may, or the same one
    later."""


class DeadlineError(TandemError):
    """A wait has reached its deadline."""


class EngineDownError(TandemError):
    """The engine of an actor has died; Serve replaces the replica."""


class EngineError(TandemError):
    """A call failed in an engine's process for a reason other than the client's request."""


class CannotResumeError(TandemError):
    """An interrupted answer cannot be continued exactly; the message gives the reason."""


class EngineStartError(TandemError):
    """An engine did not start, or cannot serve its role."""
