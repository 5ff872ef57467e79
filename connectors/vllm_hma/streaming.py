"""Chooses by measured cost whether to send a prompt's last chunk whole or layer by layer.

The transfer of an earlier chunk overlaps with the next chunk's computation. The transfer of the
last chunk, often the only one, delays the request. Layer by layer, it mostly overlaps with the
computation of later layers. It then needs more and smaller writes, and engine time to post them.
Pure: no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

# Weight of the newest measurement in the running mean.
_NEWEST = 0.2
# Interval in steps at which the slower mode is tried again.
_TRY_AGAIN_EVERY = 16
# Measurements of each mode before their costs are compared.
_FIRST_TRIES = 4


class Streaming(StrEnum):
    """Modes of sending a prompt's KV.

    ``CHUNK``  after each chunk
    ``LAYER``  the last chunk layer by layer
    ``AUTO``   the one of these modes that has the lower measured cost
    """

    CHUNK = "chunk"
    LAYER = "layer"
    AUTO = "auto"


@dataclass(slots=True)
class _MeanCost:
    """Running mean of a mode's cost, in seconds."""

    mean_s: float = 0.0
    count: int = 0

    def add(self, cost_s: float) -> None:
        self.mean_s = cost_s if not self.count else self.mean_s + _NEWEST * (cost_s - self.mean_s)
        self.count += 1


@dataclass(slots=True)
class Governor:
    """Chooses the mode of each step that ends a prompt."""

    streaming: Streaming
    _costs: dict[bool, _MeanCost] = field(default_factory=lambda: {False: _MeanCost(), True: _MeanCost()})
    _steps: int = 0

    def by_layers(self) -> bool:
        """Return whether the next step that ends a prompt sends layer by layer."""
        if self.streaming is not Streaming.AUTO:
            return self.streaming is Streaming.LAYER
        self._steps += 1
        for mode in (False, True):
            if self._costs[mode].count < _FIRST_TRIES and self._costs[mode].count <= self._costs[not mode].count:
                return mode
        better = self._costs[True].mean_s < self._costs[False].mean_s
        return better if self._steps % _TRY_AGAIN_EVERY else not better

    def cost(self, by_layers: bool, exposed_s: float, engine_s: float) -> None:
        """Record the measured cost of a step.

        ``exposed_s``  time from the end of the step to the end of its last write, in seconds
        ``engine_s``   engine time spent on handing over layers, in seconds
        """
        self._costs[by_layers].add(exposed_s + engine_s)
