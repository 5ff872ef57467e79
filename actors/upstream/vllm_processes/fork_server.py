"""Fork the processes of an engine without a GPU from a process that has imported vLLM.

vLLM spawns the engine core and the workers inside a Ray actor and on its CPU platform
(`_maybe_force_spawn` in vllm/utils/system_utils.py, `check_and_update_config` in
vllm/platforms/cpu.py): each imports torch and vLLM again, 8 s of CPU time per process. A Ray actor
or an engine core has threads and cannot be forked; Python's fork server has none.

It is not for GPUs, because CUDA does not survive a fork, nor for `executor: ray`. Engines that
compile, or whose workers are bound to cores, pass settings in environment variables that libraries
read when they are loaded.
"""

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Callable, Mapping
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

from configs.settings.base import RoleName
from configs.settings.service import ServiceSettings

USERS = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
"""vLLM's modules that start processes with `get_mp_context` of vllm/utils/system_utils.py."""

LOADED_ONCE = ("LD_PRELOAD", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "PYTHONPATH")
"""Environment variables that take effect only when a process starts or a library is loaded."""

_started_with: dict[str, str | None] = {}


def may_fork(settings: ServiceSettings, role: RoleName, arguments: Mapping[str, Any]) -> bool:
    """Return whether the engine of `role`, with these vLLM arguments, can use the fork server."""
    own = settings.role(role)
    eager = bool(arguments.get("enforce_eager"))
    return own.executor == "mp" and not own.num_gpus and eager and settings.cpu.threads_bind == "nobind"


def use_fork_server() -> None:
    """Make vLLM, in this process, start its processes from the fork server (`_context`)."""
    modules = [importlib.import_module(name) for name in USERS]
    original = modules[0].get_mp_context
    if original.__module__ == __name__:
        return  # an earlier engine of this process has replaced `get_mp_context`

    def context() -> BaseContext:
        return _context(original)

    for module in modules:
        setattr(module, "get_mp_context", context)  # noqa: B010


def stay_with_this_server() -> None:
    """Make forked processes use this fork server for their own processes. Call it in the server.

    Python would start another server (`ForkServer.ensure_running` in
    Lib/multiprocessing/forkserver.py), although forked processes have the address of this one.
    """
    server: Any = multiprocessing.forkserver._forkserver  # noqa: SLF001 (set by Python for this module only)
    server.ensure_running = lambda: None


def _context(original: Callable[[], BaseContext]) -> BaseContext:
    """Return the context of the fork server, or vLLM's own from `original`.

    Returns vLLM's own if a variable of LOADED_ONCE has changed since the first call in this
    process: the new value would have no effect on forked processes.
    """
    spawning = original()  # also sets environment variables, in a Ray actor RAY_ADDRESS
    now = {name: os.environ.get(name) for name in LOADED_ONCE}
    if not _started_with:
        _started_with.update(now)
        multiprocessing.set_forkserver_preload(["actors.upstream.vllm_processes.fork_server_preload"])
    if now != _started_with:
        return spawning
    return InheritingContext()


class _Variables:
    """Environment variables that replace those of the unpickling process."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return _set_environment, (self._values,)


def _set_environment(values: Mapping[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


class InheritingProcess(ForkServerProcess):
    """A forked process with the environment of the process that starts it, not of the server."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickled in this order: the environment is set before the process's state, whose
        # unpickling may import modules.
        return _process, (_Variables(os.environ), type(self), self.__dict__)


def _process(_: None, kind: type[InheritingProcess], state: dict[str, Any]) -> InheritingProcess:
    process = kind.__new__(kind)
    process.__dict__.update(state)
    return process


class InheritingContext(ForkServerContext):
    Process = InheritingProcess
