"""Network devices of this host, from which the connector selects those for UCX."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_RDMA = Path("/sys/class/infiniband")


def has_rdma(where: Path = _RDMA) -> bool:
    """Return whether the kernel has RDMA devices, even if this container cannot use them."""
    try:
        return any(os.scandir(where))
    except FileNotFoundError:
        return False


def rdma_ports(where: Path = _RDMA, verbs: Path = Path("/dev/infiniband")) -> tuple[str, ...]:
    """Return the active RDMA ports that this container can use, as UCX names them."""
    if not verbs.is_dir():
        return ()
    states = sorted(where.glob("*/ports/*/state"))
    return tuple(f"{one.parts[-4]}:{one.parts[-2]}" for one in states if "ACTIVE" in one.read_text().split())


def interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        # psutil appends a scope to IPv6 addresses; the kernel appends a label to names of secondary
        # addresses.
        if any(each.address.split("%")[0] == address for each in addresses):
            return name.split(":")[0]
    return None
