"""Choose for each step how to send the last chunks of its prompts, by measured cost.

The transfer of an earlier chunk overlaps with the next chunk's computation. The transfer of the
last chunk, often the only one, delays the request. If this chunk is sent layer by layer, most of
its transfer overlaps with the computation of later layers. But this mode needs more and smaller
writes, and engine time to hand each layer to the progress thread. The cost of a step is the time
from its end until the writes then in progress have ended, plus that engine time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from connectors.vllm_hma.worker_side.writes import Writes

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
    ``AUTO``   the lower measured cost; CHUNK on an accelerator
    """

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
    """Decides for each step that ends a prompt whether to send its last chunks layer by layer."""

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
        self._costs[by_layers].add(exposed_s + engine_s)


@dataclass(frozen=True, slots=True)
class Exposure:
    """Writes in progress at ``since``, the end of a step with last chunks of prompts."""

    since: float
    by_layers: bool
    engine_s: float
    writes: frozenset[int]


class LastChunks:
    """Mode of sending the last chunks of the current step, and the measurement of one step's cost.

    ``engine_s``  engine time that the step has spent on handing over layers; the owner adds to it
    """

    def __init__(self, governor: Governor, writes: Writes) -> None:
        self._governor = governor
        self._writes = writes
        self.by_layers = False
        self.engine_s = 0.0
        self._begun_before = 0
        self._exposed: Exposure | None = None

    def begin_step(self, ends_prompt: bool) -> bool:
        self.by_layers = ends_prompt and self._governor.by_layers()
        self.engine_s, self._begun_before = 0.0, self._writes.begun
        return self.by_layers

    def end_step(self, by_layers: bool, now: float) -> None:
        if self._writes.begun > self._begun_before and self._exposed is None:
            self._exposed = Exposure(now, by_layers, self.engine_s, self._writes.in_flight())

    def measure(self, now: float) -> None:
        exposed = self._exposed
        if exposed is not None and not exposed.writes & self._writes.in_flight():
            self._exposed = None
            self._governor.cost(exposed.by_layers, now - exposed.since, exposed.engine_s)
