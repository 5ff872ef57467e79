"""Run a program in a session of its own, wait until it is ready, and end all of its processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from testing.environment import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
START_S = 240.0
STOP_S = 30.0
POLL_S = 0.2

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class Program:
    """A running program. ``log`` receives its output.

    ``environment``  all of it; None: that of this process
    ``attached``     whether it is interrupted when the thread that has started it ends
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        attached: bool = False,
    ) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_stop_with_parent if attached else None,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, ready: str | Callable[[], object], within_s: float = START_S) -> None:
        """Wait for these words in the log, or for a true value.

        Raises RuntimeError, with the log's end, if the program ends or time runs out first; no
        process of it is left then.
        """
        give_up_at = time.monotonic() + within_s
        try:
            while not (ready in self.output if isinstance(ready, str) else ready()):
                if self.process.poll() is not None or time.monotonic() > give_up_at:
                    ended = f"ended with {self.process.poll()}" if self.process.poll() is not None else "is not ready"
                    raise RuntimeError(f"{self.log.stem} {ended}:\n{self.output[-4000:]}")
                time.sleep(POLL_S)
        except BaseException:
            # A caller that is stopped here has no reference to it yet.
            self.stop()
            raise

    def wait_until_up(self, url: str) -> None:
        """Wait until ``url`` answers 200; see ``wait_until``."""
        self.wait_until(lambda: is_up(url))

    def processes(self) -> list[psutil.Process]:
        """Return the program's process and its descendants; none once it has ended, since another
        process may have its id.
        """
        if self.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(self.process.pid)
                return [parent, *parent.children(recursive=True)]
        return []

    def stop(
        self, number: signal.Signals = signal.SIGTERM, within_s: float = STOP_S, group: bool = False
    ) -> list[psutil.Process]:
        """Send a signal to the process, or to its group; kill and return what is left."""
        return _end([self], number, within_s, group)

    def kill(self) -> None:
        """Send SIGKILL to all processes, as if their machine had lost power."""
        processes = self.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=STOP_S)
        self.process.wait()


def start_module(log: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Program:
    """Start ``python -m`` with the variables of engines on CPUs."""
    return Program([sys.executable, "-m", *arguments], log, os.environ | ENVIRONMENT | dict(environment or {}))


def stop(programs: Sequence[Program]) -> None:
    """Stop programs at the same time."""
    _end(programs, signal.SIGTERM, STOP_S, False)


def is_up(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def _end(programs: Sequence[Program], number: signal.Signals, within_s: float, group: bool) -> list[psutil.Process]:
    processes = [process for program in programs for process in program.processes()]
    for program in programs:
        if program.process.poll() is None:
            (os.killpg if group else os.kill)(program.process.pid, number)
    _, left = psutil.wait_procs(processes, timeout=within_s)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for program in programs:
        program.process.wait()
    return left


def _stop_with_parent() -> None:
    """Make the kernel send SIGINT to this process when the thread that forked it ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
