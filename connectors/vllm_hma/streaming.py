"""Choose by measured cost whether to send a prompt's last chunk whole or layer by layer.

The transfer of an earlier chunk overlaps with the next chunk's computation. The transfer of the
last chunk, often the only one, delays the request. If this chunk is sent layer by layer, most of
its transfer overlaps with the computation of later layers. But this mode needs more and smaller
writes, and engine time to hand each layer to the progress thread. Pure: no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

# Weight of the newest measurement in the running mean.
_NEWEST = 0.2
# Interval, in steps that end a prompt, at which the mode with the higher cost is tried again.
_TRY_AGAIN_EVERY = 16
# Measurements of each mode before their costs are compared.
_FIRST_TRIES = 4


class Streaming(StrEnum):
    """Modes of sending a prompt's KV.

    ``CHUNK``  each chunk after its step
    ``LAYER``  the last chunk layer by layer during its step, each other chunk after its step
    ``AUTO``   CHUNK or LAYER, by the lower measured cost; CHUNK on an accelerator
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
    """Decides for each step that ends a prompt whether to send its last chunks layer by layer.

    In AUTO, compares the measured mean costs of both modes.
    """

    streaming: Streaming
    _costs: dict[bool, _MeanCost] = field(default_factory=lambda: {False: _MeanCost(), True: _MeanCost()})
    _steps: int = 0

    def by_layers(self) -> bool:
        """Return whether a step that ends a prompt sends its last chunks layer by layer.

        Call it once per such step, before the forward pass.
        """
        if self.streaming is not Streaming.AUTO:
            return self.streaming is Streaming.LAYER
        self._steps += 1
        for mode in (False, True):
            if self._costs[mode].count < _FIRST_TRIES and self._costs[mode].count <= self._costs[not mode].count:
                return mode
        better = self._costs[True].mean_s < self._costs[False].mean_s
        return better if self._steps % _TRY_AGAIN_EVERY else not better

    def cost(self, by_layers: bool, exposed_s: float, engine_s: float) -> None:
        """Record the measured cost of a step that ended a prompt and posted writes.

        ``by_layers``  whether the step sent its last chunks layer by layer
        ``exposed_s``  time from the end of the step to the end of the last write that was then in
                       progress, in seconds
        ``engine_s``   engine time spent on handing layers to the progress thread, in seconds
        """
        self._costs[by_layers].add(exposed_s + engine_s)
