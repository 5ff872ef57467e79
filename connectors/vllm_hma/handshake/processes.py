"""Liveness of a process of this host, by its identity: a dead process writes no more.

Process ids are valid in one pid namespace of one running kernel only, and are reused. So an
identity contains the boot id, the namespaces and the start time. A process of another host or
namespace is UNKNOWN, never GONE.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from enum import Enum
from functools import cache
from pathlib import Path

from connectors.protocol.agent_metadata import NO_PROCESS, ProcessIdentity

_PROC = Path("/proc")
_STATE, _THREADS, _STARTED_AT = 0, 17, 19
"""Indices in ``/proc/PID/stat`` after the command name (proc_pid_stat(5))."""


class Liveness(Enum):
    """UNKNOWN: this host cannot determine it."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


def own_process() -> ProcessIdentity:
    """NO_PROCESS without a readable ``/proc``."""
    try:
        return ProcessIdentity(_host(), os.getpid(), int(_stat(os.getpid())[_STARTED_AT]))
    except OSError:
        return NO_PROCESS


def process_start_s() -> float:
    """Return the start in seconds of ``time.time()``; infinity without ``/proc``."""
    try:
        ticks = int(_stat(os.getpid())[_STARTED_AT])
    except OSError:
        return math.inf
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def liveness(process: ProcessIdentity) -> Liveness:
    """A stopped process is ALIVE. A zombie is GONE, unless other threads of it run."""
    try:
        if not process.host or process.host != _host():
            return Liveness.UNKNOWN
        # kill as well as /proc: with hidepid, /proc does not show other users' processes.
        with contextlib.suppress(PermissionError):
            os.kill(process.pid, 0)
        stat = _stat(process.pid)
    except ProcessLookupError:
        return Liveness.GONE
    except (OSError, OverflowError):
        return Liveness.UNKNOWN
    if int(stat[_STARTED_AT]) != process.started_at:
        return Liveness.GONE
    return Liveness.GONE if stat[_STATE] in "ZX" and int(stat[_THREADS]) <= 1 else Liveness.ALIVE


@cache
def _host() -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespaces = [os.stat(_PROC / "self/ns" / name).st_ino for name in ("pid", "time")]
    return "/".join([boot, *map(str, namespaces)])


def _stat(pid: int) -> list[str]:
    # The command name may have spaces.
    return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
