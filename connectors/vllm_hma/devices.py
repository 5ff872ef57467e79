"""Network devices of this host, from which the connector chooses those that UCX may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_RDMA = Path("/sys/class/infiniband")


def has_rdma(where: Path = _RDMA) -> bool:
    """Return whether the kernel has RDMA devices of any kind, visible in this container or not."""
    try:
        return any(os.scandir(where))
    except FileNotFoundError:
        return False


def interface_of(address: str) -> str | None:
    """Return the interface of this host with this address; None for host names and other hosts' addresses."""
    for name, addresses in psutil.net_if_addrs().items():
        # psutil appends a scope to an IPv6 address, and the kernel a label to the name of a secondary address.
        if any(each.address.split("%")[0] == address for each in addresses):
            return name.split(":")[0]
    return None
