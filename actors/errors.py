"""Errors of requests and engines."""

from connectors.errors import TandemError


class OverloadedError(TandemError):
    """The number of ongoing or waiting requests has reached a limit of the settings."""


class UnavailableError(TandemError):
    """No replica of a role can answer: none is running, or the replica has died."""


class BusyError(UnavailableError):
    """No replica that could answer has had a free slot in time."""


class SilentError(UnavailableError):
    """An engine with an open request has sent nothing for `silence_timeout_s`."""


class UnknownModelError(TandemError):
    """No model or adapter of the service has the name in a request."""


class NoModelNamedError(TandemError):
    """A request without `model` to a service with several models."""


class HandoverError(UnavailableError):
    """Decode did not take over after prefill's first token, although its engine may run.

    Another attempt may use the same decode replica.
    """


class RefusedError(TandemError):
    """The engine is full or stopping. Another engine may accept the call."""


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
