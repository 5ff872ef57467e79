"""Run the service in its own processes, as an operator does, and check that all of them end."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from testing.ports import free_port
from testing.programs import ROOT, Program

START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 60.0


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
        return self._program.output

    def start(self) -> None:
        """Start the service and wait until the launcher reports that it is ready.

        Raises RuntimeError if the start fails; no process then remains. `log` includes the output
        of Ray, actors and engines.
        """
        command = [*self.command, "--config", str(self.config), "--port", str(self.port), *self.arguments]
        environment = os.environ | {"VERBOSE": "1"} | dict(self.environment)
        self._program = Program(command, self.folder / "service.log", environment, self.cwd, attached=True)
        self._program.wait_until("tandem: ready", START_TIMEOUT_S)

    def processes(self) -> list[psutil.Process]:
        """Return the launcher and all its descendants: Ray's processes, actors, engine cores and
        workers.
        """
        return self._program.processes()

    def stop(self, number: signal.Signals = signal.SIGINT, group: bool = False) -> list[psutil.Process]:
        """Send a signal to the launcher, or to its process group.

        Kill the processes left after STOP_TIMEOUT_S and return them.
        """
        return self._program.stop(number, STOP_TIMEOUT_S, group)


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
