"""NIXL listens on the configured devices only."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from connectors.errors import ConfigurationError
from connectors.transport.nixl import NixlTransport

PROGRAM = """
import sys
from connectors.transport.nixl import NixlTransport
transport = NixlTransport("here/0", devices=tuple(sys.argv[1:]))
print("up", flush=True)
sys.stdin.read()
transport.close()
"""


def listening(*devices: str) -> set[str]:
    """Return the addresses on which a process with a NIXL transport of these devices listens."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *devices],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            while process.stdout.readline() not in ("up\n", ""):
                pass
            sockets = psutil.Process(process.pid).net_connections("inet")
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            process.kill()
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def test_only_the_devices_that_are_named() -> None:
    """Without the setting, UCX listens on all of this host's addresses; connections break when an
    interface disappears.
    """
    assert listening("lo") == {"127.0.0.1"}
    others = {
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name != "lo" and address.family.name == "AF_INET" and psutil.net_if_stats()[name].isup
    }
    assert others <= listening() | {"127.0.0.1"}


def test_a_back_end_that_does_not_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"transfer.backends.*UCZ"):
        NixlTransport("here/0", ("UCX", "UCZ"))
