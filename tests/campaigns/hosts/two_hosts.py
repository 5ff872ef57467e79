"""The service on two simulated hosts of this machine. Needs root.

    python -m tests.campaigns.hosts.two_hosts [--rate 800mbit] [--config configs/two-hosts.yaml]

Each host runs a Ray node: prefill on one, the router and decode on the other. They share the
kernel, the file system and a switch between them, whose ports can be cut. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.run import CURL, DEMO_PROMPT
from configs.settings.service import DEMO_SERVED_NAME
from testing.hosts import Host, Switch, hosts
from testing.signals import interrupt_on_signals
from tests.campaigns.hosts.port_forward import forwarded_port

FRONT, BACK = "decode", "prefill"
"""The host with Ray's head, the router and decode, and the one with prefill."""

RAY_PORT, HTTP_PORT = 6379, 8000
START_TIMEOUT_S = 300.0
NODE_TIMEOUT_S = 120.0


@dataclass
class TwoHosts:
    """The service.

    ``ray`` is additional environment of both Ray nodes (``RAY_...``: its own timeouts).
    """

    switch: Switch
    config: Path
    folder: Path
    url: str
    ray: dict[str, str]

    def __post_init__(self) -> None:
        # A token authenticates Ray's nodes and processes that join them.
        self._environment = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **self.ray,
        }

    @property
    def front(self) -> Host:
        return self.switch.hosts[FRONT]

    @property
    def back(self) -> Host:
        return self.switch.hosts[BACK]

    def start(self) -> None:
        """Return when the launcher reports that the service is ready."""
        head = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", '--resources={"decode": 1, "router": 1}']
        self._start_node(self.front, *head)
        self.start_back()
        address = f"{self.front.address}:{RAY_PORT}"
        launch = ["-m", "app.run", "--config", str(self.config), "--address", address, "--port", str(HTTP_PORT)]
        service = self.front.start([sys.executable, *launch], self.folder / "service.log", **self._environment)
        service.wait_until("tandem: ready", START_TIMEOUT_S)

    def start_back(self) -> None:
        """Start (again) the Ray node for prefill."""
        self._start_node(self.back, f"--address={self.front.address}:{RAY_PORT}", '--resources={"prefill": 1}')

    def _start_node(self, host: Host, *arguments: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
        own = [f"--node-ip-address={host.address}", f"--temp-dir={self.folder / host.name}"]
        small = ["--num-cpus=1", "--object-store-memory=100000000"]
        log = self.folder / f"ray-{host.name}-{time.monotonic_ns()}.log"
        node = host.start([*command, *own, *small], log, **self._environment)
        node.wait_until("Ray runtime started", NODE_TIMEOUT_S)


@contextlib.contextmanager
def two_hosts(config: Path, rate: str, **ray: str) -> Iterator[TwoHosts]:
    """Start the service; remove all of it afterwards."""
    # Ray's sockets lie below this folder, and the path of a socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="hosts"))
    try:
        with hosts([FRONT, BACK], rate) as switch:
            front = switch.hosts[FRONT]
            with forwarded_port(front.pid, front.address, HTTP_PORT) as port:
                service = TwoHosts(switch, config, folder, f"http://127.0.0.1:{port}", ray)
                service.start()
                yield service
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/two-hosts.yaml"))
    parser.add_argument("--rate", default="800mbit", help="of each host's link, in tc's words; empty: none")
    arguments = parser.parse_args()
    interrupt_on_signals()
    print("two hosts: starting a Ray node on each, and the service; this takes two minutes or so", flush=True)
    with contextlib.suppress(KeyboardInterrupt), two_hosts(arguments.config, arguments.rate) as service:
        port = f"nsenter -t {service.switch.pid} -n ip link set {BACK}"
        print("two hosts: ready; try:")
        print(CURL.format(address=service.url.removeprefix("http://"), model=DEMO_SERVED_NAME, prompt=DEMO_PROMPT))
        print(f"two hosts: `{port} down` cuts prefill off, `{port} up` mends it; logs are in {service.folder}")
        print(f"two hosts: `{' '.join(service.back.command(['bash']))}` is a shell on prefill's host", flush=True)
        threading.Event().wait()
    print("two hosts: stopped")


if __name__ == "__main__":
    main()
