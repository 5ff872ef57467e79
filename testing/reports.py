"""Receive what a child process sends through a pipe, with a deadline."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


def report_of(process: BaseProcess, pipe: Connection, within_s: float = 200.0) -> Any:
    """Return the next object that the process sends.

    Raises RuntimeError if the process ends first, or sends nothing for ``within_s`` seconds.
    """
    ready = wait([pipe, process.sentinel], within_s)
    if not ready:
        raise RuntimeError(f"{process.name} sent nothing within {within_s:g} s")
    with contextlib.suppress(EOFError, ConnectionResetError):
        if pipe in ready:
            return pipe.recv()
    process.join(within_s)
    raise RuntimeError(f"{process.name} ended with status {process.exitcode} before it sent anything; see stderr")
