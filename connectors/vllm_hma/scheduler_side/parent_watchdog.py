"""An engine core does not outlive the process that started it.

vLLM stops its engine core where the process that asked for it shuts down; where that is killed, the core would live on,
hold its memory and answer its peers. Workers of larger engines end with the core: vLLM sees to that.
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
    """Kill this process when its parent has ended. Does nothing where ``multiprocessing`` has not started it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for, args=(parent.sentinel,), name="tandem-parent-watchdog", daemon=True).start()


def _wait_for(sentinel: int) -> None:
    wait([sentinel])
    logger.critical("Tandem: the process that started this engine is gone: the engine ends, too")
    os.kill(os.getpid(), signal.SIGKILL)
