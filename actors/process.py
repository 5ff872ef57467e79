"""The process of an actor: its log, and its limit of open files."""

import contextlib
import os
import stat
from pathlib import Path

from configs.settings.router import MIN_ONGOING_SEQUENCES, RouterSettings
from connectors.logs import log_to
from connectors.open_files import OTHER_FILES, raise_limit


def prepare_process(name: str, needed_files: int = OTHER_FILES) -> None:
    """Configure the log of this actor's process, and raise its limit of open files."""
    # Not `sys.stdout`: with RAY_SERVE_LOG_TO_STDERR=0, Serve logs each line again, at INFO.
    log_to(os.fdopen(1, "w", encoding="utf-8", closefd=False), name)
    raise_limit(needed_files)


def open_files_of(settings: RouterSettings) -> int:
    """Return the number of files that a router may need: one per sequence, and others."""
    return (settings.max_ongoing_sequences or MIN_ONGOING_SEQUENCES) + OTHER_FILES


def own_logs() -> list[Path]:
    """Return the files to which Ray redirects stderr and stdout; engine processes inherit both.

    Omits a stream that is not redirected to a file.
    """
    logs = []
    for stream in (2, 1):
        path = Path(os.readlink(f"/proc/self/fd/{stream}"))
        if stat.S_ISREG(os.fstat(stream).st_mode) and path.exists():
            logs.append(path)
    return logs


def link_logs(logs: list[Path], name: str) -> None:
    """Link each log as `name` with its suffix; Ray names logs by worker and process ids.

    Omits links that cannot be created.
    """
    for path in logs:
        with contextlib.suppress(OSError):
            path.with_name(f"{name}{path.suffix}").symlink_to(path.name)
