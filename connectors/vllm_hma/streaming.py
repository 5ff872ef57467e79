"""Choice between sending a prompt's last chunk whole or layer by layer, by the measured cost of each. Pure: no clock.

The transfer of an earlier chunk overlaps with the next chunk's computation; that of the last one, often the only one,
delays the request. Sent layer by layer, most of it overlaps with the computation of later layers, at the cost of more
and smaller writes, and of the engine's time to post them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

# Weight of the newest measurement in the running mean, and the interval in steps at which the slower mode is retried.
_NEWEST = 0.2
_TRY_AGAIN_EVERY = 16
_FIRST_TRIES = 4


class Streaming(StrEnum):
    """``CHUNK`` after each chunk, ``LAYER`` the last chunk layer by layer, ``AUTO`` whichever has cost less."""

    CHUNK = "chunk"
    LAYER = "layer"
    AUTO = "auto"


@dataclass(slots=True)
class _MeanCost:
    mean_s: float = 0.0
    count: int = 0

    def add(self, cost_s: float) -> None:
        self.mean_s = cost_s if not self.count else self.mean_s + _NEWEST * (cost_s - self.mean_s)
        self.count += 1


@dataclass(slots=True)
class Governor:
    """Decides for each step whether to send layer by layer, from the measured cost."""

    streaming: Streaming
    _costs: dict[bool, _MeanCost] = field(default_factory=lambda: {False: _MeanCost(), True: _MeanCost()})
    _steps: int = 0

    def by_layers(self) -> bool:
        """Return whether the next step that ends a prompt sends layer by layer."""
        if self.streaming is not Streaming.AUTO:
            return self.streaming is Streaming.LAYER
        self._steps += 1
        for way in (False, True):
            if self._costs[way].count < _FIRST_TRIES and self._costs[way].count <= self._costs[not way].count:
                return way
        better = self._costs[True].mean_s < self._costs[False].mean_s
        return better if self._steps % _TRY_AGAIN_EVERY else not better

    def cost(self, by_layers: bool, exposed_s: float, engine_s: float) -> None:
        """A step's last bytes arrived ``exposed_s`` after it; handing over took ``engine_s`` of the engine's time."""
        self._costs[by_layers].add(exposed_s + engine_s)
