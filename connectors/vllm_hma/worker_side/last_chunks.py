"""Choose for each step how to send the last chunks of its prompts, and measure the choice's cost.

The cost of a step is the time from its end until the writes then in progress have ended, plus the
engine time spent on handing over layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from connectors.vllm_hma.streaming import Governor
from connectors.vllm_hma.worker_side.writes import Writes


@dataclass(frozen=True, slots=True)
class Exposure:
    """Writes in progress at the end of a step with last chunks of prompts.

    ``since``      time at which this worker handled the end of the step, in ``time.monotonic()``
                   seconds
    ``by_layers``  whether the last chunks were sent layer by layer
    ``engine_s``   engine time spent on handing over layers, in seconds
    ``writes``     ids of all writes in progress at ``since``
    """

    since: float
    by_layers: bool
    engine_s: float
    writes: frozenset[int]


class LastChunks:
    """Mode of sending the last chunks of the current step, and the measurement of one step's cost.

    ``by_layers``  whether the current step sends its last chunks layer by layer
    ``engine_s``   engine time that the current step has spent on handing over layers, in seconds;
                   the owner adds to it
    """

    def __init__(self, governor: Governor, writes: Writes) -> None:
        self._governor = governor
        self._writes = writes
        self.by_layers = False
        self.engine_s = 0.0
        self._begun_before = 0
        self._exposed: Exposure | None = None

    def begin_step(self, ends_prompt: bool) -> bool:
        """Choose the mode of a step before its forward pass; return ``by_layers``.

        ``ends_prompt``  whether the step computes the last chunk of a prompt
        """
        self.by_layers = ends_prompt and self._governor.by_layers()
        self.engine_s, self._begun_before = 0.0, self._writes.begun
        return self.by_layers

    def end_step(self, by_layers: bool, now: float) -> None:
        """Begin to measure the cost of a step with last chunks, unless another one is measured.

        A step that began no writes is not measured.
        """
        if self._writes.begun > self._begun_before and self._exposed is None:
            self._exposed = Exposure(now, by_layers, self.engine_s, self._writes.in_flight())

    def measure(self, now: float) -> None:
        """Report the cost of the measured step to the governor, once its writes have ended."""
        exposed = self._exposed
        if exposed is not None and not exposed.writes & self._writes.in_flight():
            self._exposed = None
            self._governor.cost(exposed.by_layers, now - exposed.since, exposed.engine_s)
