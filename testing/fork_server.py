"""Fork engine processes from one process that has already imported vLLM.

A spawned vLLM process spends 8 s of processor time on imports, and an engine is a tree of at least
two such processes. Forked from ``multiprocessing``'s fork server, an engine starts in 2 to 3 s.
"""

from __future__ import annotations

import multiprocessing
import os

from vllm.envs import environment_variables

from testing.environment import ENVIRONMENT

CONTEXT = multiprocessing.get_context("forkserver")
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def prepare() -> None:
    """Make vLLM fork the engine cores that this process starts. Repeated calls have no effect.

    The fork server copies this process's environment when it starts, so this function sets
    ENVIRONMENT first.
    """
    assert _METHOD in environment_variables, f"vLLM no longer reads {_METHOD}: see vllm/utils/system_utils.py"
    os.environ.update(ENVIRONMENT)
    CONTEXT.set_forkserver_preload(["testing.preload"])
    # vLLM's CPU platform sets `spawn` in os.environ (vllm/platforms/cpu.py), and vLLM does not
    # accept `forkserver` there.
    environment_variables[_METHOD] = lambda: "forkserver"
