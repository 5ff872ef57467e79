"""Ray nodes of one cluster on this machine, each started by `ray start` and killed by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testing.ports import free_port
from testing.programs import Program

BIN = Path(sys.executable).parent
START_S = 90.0
STOP_S = 20.0


@dataclass
class RayCluster:
    """A head node without CPUs and its worker nodes. Their session is in ``folder``, a short path.

    ``environment``  environment of all nodes, besides this process's
    ``nodes``        all nodes, in the order of their starts, also those that have not started
    """

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    gcs_port: int = field(default_factory=free_port)
    dashboard_port: int = field(default_factory=free_port)
    nodes: list[Program] = field(default_factory=list, init=False)

    @property
    def shell(self) -> dict[str, str]:
        """Environment of commands that use the cluster, and of its nodes."""
        own = {
            "HOME": str(self.folder),  # the folder of Ray's authentication token
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_ADDRESS": f"127.0.0.1:{self.gcs_port}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard_port}",
        }
        return os.environ | own | dict(self.environment)

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment's `bin` folder, such as `serve status`."""
        return subprocess.run(
            self.command(*command), env=self.shell, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def command(self, *words: str) -> list[str]:
        return [str(BIN / words[0]), *words[1:]]

    def start_head(self, *options: str) -> Program:
        """Start the head node, on the same ports each time. Raises RuntimeError if it fails."""
        # `ray start` takes the workers on this machine for a running cluster with this address.
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        ports = (f"--port={self.gcs_port}", f"--dashboard-port={self.dashboard_port}")
        return self._start("head", "--head", *ports, "--num-cpus=0", *options)

    def start_worker(self, cpus: int, *options: str, **environment: str) -> Program:
        """Start a node that joins the head. Raises RuntimeError if it fails."""
        join = (f"--address=127.0.0.1:{self.gcs_port}", f"--num-cpus={cpus}")
        return self._start("worker", *join, *options, **environment)

    def stop(self) -> None:
        """Stop all nodes, the last one first."""
        for node in reversed(self.nodes):
            node.stop(within_s=STOP_S)

    def _start(self, name: str, *options: str, **environment: str) -> Program:
        port = f"--dashboard-agent-listen-port={free_port()}"
        own = {name: value for name, value in self.shell.items() if name != "RAY_ADDRESS"} | environment
        command = self.command("ray", "start", "--block", "--disable-usage-stats", port, *options)
        node = Program(command, self.folder / f"{name}.log", own, Path.cwd())
        self.nodes.append(node)
        node.wait_until("--block", START_S)
        return node
