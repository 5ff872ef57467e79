"""The deadlines of the protocol. Every wait of either machine is bounded by one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from connectors.errors import ConfigurationError

_K = TypeVar("_K")
_V = TypeVar("_V")

MIN_FORGET_S = 1800.0
"""Of what an operator may set. TCP goes on with a message for up to half an hour; one that comes after its sender has
been forgotten could be taken for a new one (docs/decisions/0009)."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """All in seconds.

    ``handshake_s``   first contact with an engine, the fetching of its agent metadata included
    ``progress_s``    a consumer waits this long without hearing anything of a transfer, queued or offered, before it
                      gives up
    ``cancel_s``      between two Cancels while a producer has not answered; after the first of these, the request is
                      computed in other blocks, and its own are in quarantine
    ``lease_s``       a producer holds finished blocks for a consumer that has not offered; also how long it remembers
                      ids of finished transfers and offers whose request has not come
    ``alive_s``       a producer that cannot write yet says that it is alive this often
    ``step_s``        a producer whose engine has queued work and has ended no step for so long is no longer alive.
                      The default is what vLLM allows a step before it ends the engine
                      (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS): no step that vLLM would wait for costs a transfer
    ``fence_s``       a preempted producer request waits for writes in flight until this long after they were posted
    ``forget_s``      a producer forgets a consumer worker that has said nothing for so long, a consumer after half of
                      it a producer engine that it has not used, so that the forgotten one is seldom spoken to
    """

    handshake_s: float = 30.0
    progress_s: float = 30.0
    cancel_s: float = 5.0
    lease_s: float = 60.0
    alive_s: float = 5.0
    step_s: float = 300.0
    fence_s: float = 2.0
    forget_s: float = 3600.0

    @property
    def hang_s(self) -> float:
        """A delivery whose writes do not end is given up after this: its consumer has done so by then."""
        return 2 * self.progress_s

    def silence_s(self, connecting: bool) -> float:
        """Time without a message after which a consumer gives up a transfer, during the handshake or after it."""
        return max(self.handshake_s, self.progress_s) if connecting else self.progress_s

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigurationError(f"transfer.{field.name} must be a positive number of seconds, not {value!r}")
        if self.alive_s * 2 > self.progress_s:
            raise ConfigurationError(
                f"transfer.alive_s ({self.alive_s}) must be at most half of transfer.progress_s ({self.progress_s}), "
                "or a producer that waits its turn is taken for dead"
            )


def due(items: Mapping[_K, _V], is_due: Callable[[_V], bool]) -> list[_K]:
    """Return the keys of the leading items that are due, of a dict in the order of its deadlines.

    >>> due({"a": 1, "b": 2, "c": 5}, lambda at: at < 3)
    ['a', 'b']
    """
    found: list[_K] = []
    for key, value in items.items():
        if not is_due(value):
            break
        found.append(key)
    return found
