"""vLLM's scheduler with the step times of a larger engine: real steps, then a pause."""

import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

PROMPT_TOKENS_PER_S, STEP_S, SEQUENCE_S = 1000.0, 0.1, 0.01
"""Ten times slower than the simulation's engine; a sequence costs more, for fewer sequences."""


def step_s(tokens: list[int]) -> float:
    """Return the time of a step with these numbers of tokens, one per request."""
    decoding = tokens.count(1)
    return (sum(tokens) - decoding) / PROMPT_TOKENS_PER_S + (STEP_S + SEQUENCE_S * decoding if decoding else 0.0)


class PacedScheduler(Scheduler):
    _began_s = 0.0

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        self._began_s = time.monotonic()
        return super().schedule(*args, **options)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        until_s = self._began_s + step_s(list(scheduler_output.num_scheduled_tokens.values()))
        time.sleep(max(until_s - time.monotonic(), 0.0))
        return super().update_from_output(scheduler_output, *args)
