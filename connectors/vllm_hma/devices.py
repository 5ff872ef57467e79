"""Which network devices this host has, as far as it matters for what UCX is told to use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_RDMA = Path("/sys/class/infiniband")


def has_rdma(where: Path = _RDMA) -> bool:
    """Whether the kernel knows RDMA devices of any kind, this container's or not."""
    try:
        return any(os.scandir(where))
    except FileNotFoundError:
        return False


def interface_of(address: str) -> str | None:
    """The interface of this host that has an address; None for names, and for addresses that are not this host's."""
    for name, addresses in psutil.net_if_addrs().items():
        # With a scope behind an IPv6 address, and a label behind the interface of a second one.
        if any(each.address.split("%")[0] == address for each in addresses):
            return name.split(":")[0]
    return None
