"""Ray nodes of one cluster on this machine, each started by `ray start` and killed by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from testing.ports import free_port

BIN = Path(sys.executable).parent
START_S = 90.0
STOP_S = 20.0


@dataclass
class RayNode:
    """One node. ``log`` receives the output of `ray start`."""

    log: Path
    process: subprocess.Popen[bytes]

    def family(self) -> list[psutil.Process]:
        """Return all processes of the node: Ray's own, actors, and what these have started.

        Return none once `ray start` has ended: another process may have its id.
        """
        if self.process.poll() is not None:
            return []
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Send SIGKILL to all processes of the node, as if its machine had lost power."""
        family = self.family()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=STOP_S)
        self.process.wait()

    def stop(self) -> None:
        """Send SIGTERM; kill the processes that are left after STOP_S."""
        family = self.family()
        self.process.terminate()
        _, left = psutil.wait_procs(family, timeout=STOP_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


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
    nodes: list[RayNode] = field(default_factory=list, init=False)

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

    def start_head(self, *options: str) -> RayNode:
        """Start the head node, on the same ports each time. Raises RuntimeError if it fails."""
        # `ray start` takes the workers on this machine for a running cluster with this address.
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        ports = (f"--port={self.gcs_port}", f"--dashboard-port={self.dashboard_port}")
        return self._start("head", "--head", *ports, "--num-cpus=0", *options)

    def start_worker(self, cpus: int, *options: str, **environment: str) -> RayNode:
        """Start a node that joins the head. Raises RuntimeError if it fails."""
        join = (f"--address=127.0.0.1:{self.gcs_port}", f"--num-cpus={cpus}")
        return self._start("worker", *join, *options, **environment)

    def stop(self) -> None:
        """Stop all nodes, the last one first."""
        for node in reversed(self.nodes):
            node.stop()

    def _start(self, name: str, *options: str, **environment: str) -> RayNode:
        path = self.folder / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [
                    str(BIN / "ray"),
                    "start",
                    "--block",
                    "--disable-usage-stats",
                    f"--dashboard-agent-listen-port={free_port()}",
                    *options,
                ],
                env={name: value for name, value in self.shell.items() if name != "RAY_ADDRESS"} | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = RayNode(path, process)
        self.nodes.append(node)
        give_up_at = time.monotonic() + START_S
        while "--block" not in path.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > give_up_at:
                node.kill()
                raise RuntimeError(f"the {name} node did not start:\n{path.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        return node
