"""Errors of requests and of engines, as routers and engines raise them."""

from connectors.errors import TandemError


class OverloadedError(TandemError):
    """More requests wait for a role's replicas than its `max_queued_requests`."""


class UnavailableError(TandemError):
    """No replica of a role can answer: none is running, or the one that was asked has died."""


class RefusedError(TandemError):
    """The engine that was asked takes no more calls, for now or ever: another one may, or the same a little later."""


class DeadlineError(TandemError):
    """A wait came to its deadline."""


class EngineDownError(TandemError):
    """The engine behind an actor has died; Serve replaces the replica."""


class EngineError(TandemError):
    """A call failed in an engine's process, with an error that is none of the client's."""


class CannotResumeError(TandemError):
    """An answer that was cut off cannot be continued exactly; the message says why."""


class EngineStartError(TandemError):
    """An engine that did not start, or started but cannot serve its role."""
