"""Run the service in its own processes, as an operator does, and check that all of them end."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from testing.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 60.0


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _stop_with_parent() -> None:
    """Make the kernel send SIGINT to this process when the thread that forked it ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


@dataclass
class ServiceProcess:
    """A process of `tandem run` with one of the shipped configurations, on its own port."""

    config: Path
    folder: Path
    port: int = field(default_factory=free_port)
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = (sys.executable, "-m", "app.run")
    arguments: Sequence[str] = ()
    cwd: Path = ROOT

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "service.log").read_text(errors="replace")

    def start(self) -> None:
        """Start the service and wait until the launcher reports that it is ready.

        Raises RuntimeError if the start fails; no process then remains. `log` includes the output
        of Ray, actors and engines.
        """
        with (self.folder / "service.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*self.command, "--config", str(self.config), "--port", str(self.port), *self.arguments],
                cwd=self.cwd,
                env=os.environ | {"VERBOSE": "1"} | dict(self.environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )
        try:
            self._until_ready()
        except BaseException:
            # The launcher runs in its own session, and a caller stopped here has no reference to it
            # yet.
            self.stop()
            raise

    def _until_ready(self) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while "tandem: ready" not in self.log:
            if self._process.poll() is not None:
                raise RuntimeError(f"the service ended with {self._process.returncode}:\n{self.log[-4000:]}")
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"not ready in {START_TIMEOUT_S:g} s:\n{self.log[-4000:]}")
            time.sleep(0.5)

    def processes(self) -> list[psutil.Process]:
        """Return the launcher and all its descendants: Ray's processes, actors, engine cores and
        workers.
        """
        launcher = psutil.Process(self._process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def stop(self, number: signal.Signals = signal.SIGINT, group: bool = False) -> list[psutil.Process]:
        """Send a signal to the launcher, or to its process group.

        Kill the processes left after STOP_TIMEOUT_S and return them.
        """
        if self._process.poll() is not None:
            return []
        family = self.processes()
        (os.killpg if group else os.kill)(self._process.pid, number)
        _, left = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        for process in left:
            process.kill()
        self._process.wait()
        return left


def write_config(base: str, folder: Path, **sections: Mapping[str, object] | str) -> Path:
    """Write a shipped configuration with keys of its `args`, or of sections of them, replaced.

    Return the path of the written file.
    """
    config = yaml.safe_load((ROOT / "configs" / base).read_text())
    for name, values in sections.items():
        args = config["applications"][0]["args"]
        args[name] = args.get(name, {}) | dict(values) if isinstance(values, Mapping) else values
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
