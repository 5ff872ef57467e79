"""Deadlines of requests and steps that wait for a peer, a write or a step, and of state of
transfers and peers. None releases blocks of a consumer to which a producer rank may still write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from connectors.errors import ConfigurationError

_K = TypeVar("_K")
_V = TypeVar("_V")

MIN_FORGET_S = 1800.0
"""Lower limit of ``forget_s``. TCP retransmits for up to half an hour, and a message that arrives
after its sender was removed could count as new (docs/decisions/0009)."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Positive deadlines and intervals of transfers, in seconds. ``vllm_hma/settings.py`` describes
    them. Beyond that:

    ``progress_s``  also the time without progress of a delivery's writes (``hang_s``) after which
                    the producer sends no Alive to the consumer rank
    ``cancel_s``    interval between Cancels to producer ranks that do not answer. Also the limit of
                    a request to a witness for the state of a suspect's process
    ``lease_s``     also the time for which a producer keeps messages of a transfer whose prefill
                    request has not arrived, both sides keep ids of ended transfers, and a consumer
                    keeps a Cancel that waits for a handshake
    ``step_s``      vLLM's default of VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, after which it ends the
                    engine
    ``forget_s``    a consumer forgets an unused producer engine after half of it, so consumers
                    seldom contact a producer that has removed them

    Raises ConfigurationError if ``alive_s`` exceeds half of ``progress_s``.
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
        """Seconds without progress (the start or end of a write) after which a delivery's writes
        count as hanging and the producer abandons it.

        It exceeds progress_s, so the consumer abandons the transfer first. A consumer also fails a
        transfer whose digests are still being compared this long after the last Fin.
        """
        return 2 * self.progress_s

    def silence_s(self, connecting: bool) -> float:
        return max(self.handshake_s, self.progress_s) if connecting else self.progress_s

    def __post_init__(self) -> None:
        if self.alive_s * 2 > self.progress_s:
            raise ConfigurationError(
                f"transfer.alive_s ({self.alive_s} s) must be at most half of transfer.progress_s "
                f"({self.progress_s} s); otherwise, the consumer abandons transfers of a live producer"
            )


def due(items: Mapping[_K, _V], is_due: Callable[[_V], bool]) -> list[_K]:
    """Return the leading keys whose values are due. ``items`` must be sorted by deadline.

    >>> due({"a": 1, "b": 2, "c": 5}, lambda at: at < 3)
    ['a', 'b']
    """
    found: list[_K] = []
    for key, value in items.items():
        if not is_due(value):
            break
        found.append(key)
    return found
