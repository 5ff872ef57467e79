"""End an engine core, or vLLM's data-parallel coordinator, when the process that started it ends.

vLLM stops its core when the parent shuts down, but not when it is killed: the core would keep its
memory and answer its peers. It ends workers with the core (vllm/v1/executor/multiproc_executor.py,
``death_writer``).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

logger = logging.getLogger(__name__)


def end_with_parent() -> None:
    """Kill this process when its parent ends, if ``multiprocessing`` started it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for, args=(parent.sentinel,), name="tandem-parent-watchdog", daemon=True).start()


def _wait_for(sentinel: int) -> None:
    wait([sentinel])
    logger.critical("Tandem: the parent of this vLLM process has ended, so this process kills itself")
    os.kill(os.getpid(), signal.SIGKILL)
