"""End vLLM's data-parallel coordinator when the process that started it is killed. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/coordinator.py
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc

from connectors.vllm_hma.upstream.parent_watchdog import end_with_parent

_RUN = DPCoordinatorProc.run_coordinator


def run_coordinator(*arguments: Any, **named: Any) -> None:
    # A function of this module: ``multiprocessing`` pickles it by name, with every start method.
    end_with_parent()
    _RUN(*arguments, **named)


def end_coordinator_with_parent() -> None:
    """Repeated calls have no effect."""
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)
