"""Choose ports for test servers that no other process uses between the choice and the bind.

A port that the kernel chooses (``bind`` to 0) comes from the range of outgoing connections, so an
outgoing connection may use it. This module chooses ports below that range. A counter shared by all
processes of the machine returns each port again only after all others.
"""

from __future__ import annotations

import fcntl
import inspect
import os
import socket
import tempfile
from pathlib import Path

FIRST, AFTER_LAST = 20_000, 32_000
"""Range between the ports of Ray's workers (10002 to 19999) and the kernel's (from 32768)."""

_COUNTER = Path(tempfile.gettempdir()) / f"tandem-test-ports-{os.getuid()}"


def free_port() -> int:
    """Return a TCP port without a listener that no other caller has received recently.

    Raises RuntimeError if every port is in use.
    """
    with _COUNTER.open("a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        port = int(counter.read() or FIRST)
        for _ in range(FIRST, AFTER_LAST):
            port = port + 1 if port + 1 < AFTER_LAST else FIRST
            if _is_free(port):
                counter.truncate(0)
                counter.write(str(port))
                return port
    raise RuntimeError(f"every TCP port from {FIRST} to {AFTER_LAST - 1} is in use")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


def give_vllm_these_ports() -> None:
    """Make vLLM choose its process groups' ports by ``free_port`` (vllm/utils/network_utils.py)."""
    from vllm.utils import network_utils

    assert list(inspect.signature(network_utils._get_open_port).parameters) == ["start_port", "max_attempts"]  # noqa: SLF001
    network_utils._get_open_port = lambda start_port=None, max_attempts=None: free_port()  # noqa: SLF001
