"""Errors of requests and engines."""

from collections.abc import Mapping
from typing import Any

from connectors.errors import TandemError


class OverloadedError(TandemError):
    """A limit of requests is reached, or the request would miss its deadline in the queue.

    ``retry_after_s``  estimated time until a retry is admitted; 0: unknown
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(TandemError):
    """A request cannot be served now: its engines do not run, have died, are silent or busy."""


class BusyError(UnavailableError):
    """No replica that can answer the call had a free slot before the deadline."""


class SilentError(UnavailableError):
    """An engine with an open request has sent nothing for `silence_timeout_s`."""


class UnknownModelError(TandemError):
    """No model or adapter of the service has the name in a request."""


class UnknownEngineError(TandemError):
    """No engine, or more than one, has an id that begins with the one that an operator gave."""


class LastEngineError(TandemError):
    """The engine cannot be drained: no other decode engine of its model accepts calls."""


class NoModelNamedError(TandemError):
    """A request without `model` to a service with the setting `models`."""


class HandoverError(UnavailableError):
    """Decode did not continue an answer after prefill's first token.

    Decode refused the request or sampled another token, or the prefill leg broke. The decode
    engine may still run, so another attempt may use the same replica.
    """


class MovedError(UnavailableError):
    """The engine of a stream is stopping; ``transfer`` as in `Moved`."""

    def __init__(self, transfer: Mapping[str, Any]) -> None:
        super().__init__("the engine of the stream is stopping; send the request again")
        self.transfer = transfer


class RefusedError(TandemError):
    """The engine is full or stopping. Another engine may accept the call."""


class DeadlineError(TandemError):
    """A wait has reached its deadline."""


class EngineDownError(TandemError):
    """An engine has died, hangs, is stopping or cannot be reached, or its call was cancelled."""


class EngineError(TandemError):
    """A call or a method failed in an engine with an internal error or an unexpected status."""


class CannotResumeError(TandemError):
    """An interrupted answer cannot be continued exactly; the message gives the reason."""


class EngineStartError(TandemError):
    """An engine did not start, or cannot serve its role."""


def with_causes(error: BaseException) -> str:
    """Return the message of an error and the messages of its causes, for logs.

    Clients receive only the error's own message, because the messages of causes name replicas.
    """
    messages = [str(error)]
    while (cause := error.__cause__) is not None:
        error = cause
        if str(error) not in messages[-1]:
            messages.append(str(error))
    return ": ".join(messages)
