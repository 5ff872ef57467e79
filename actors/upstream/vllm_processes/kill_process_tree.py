"""Kill the processes of an engine even if some of them end meanwhile.

If one process of an engine ends, a thread of vLLM terminates the others, kills those that still run
after 5 s, and then marks the engine as dead. vLLM's `kill_process_tree` raises NoSuchProcess if a
process ends just before it is killed, often on a busy machine. The error ends the thread, so vLLM
never marks the engine as dead. Source: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/utils/system_utils.py
"""

from contextlib import suppress

import psutil
from vllm.v1 import utils


def ignore_ended_processes() -> None:
    utils.kill_process_tree = kill_process_tree


def kill_process_tree(pid: int) -> None:
    """Kill a process and its descendants, except those that have ended."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
