"""Enter another network namespace. Needs root."""

from __future__ import annotations

import ctypes

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MNT_DETACH = 2
_PRIVATE = 0x4000 | 1 << 18
"""Flags of mount(2): MS_REC and MS_PRIVATE."""


def enter_network(path: str) -> None:
    """Move the calling thread and its later children into the network namespace at ``path``.

    /sys then lists the devices of that namespace; UCX reads them there. Only for processes that
    have not started a thread.
    """
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _PRIVATE, None)
    with open(path, encoding="utf-8") as network:
        _call("setns", network.fileno(), _CLONE_NEWNET)
    _call("umount2", b"/sys", _MNT_DETACH)
    _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
