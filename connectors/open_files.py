"""Limit of open files of a process: connections are open files, too."""

from __future__ import annotations

import asyncio
import logging
import resource

logger = logging.getLogger(__name__)

OTHER_FILES = 1024
"""Files of a process beside its clients' connections: libraries, Ray, peers; an estimate."""

FEW = 64
"""Number of free descriptors below which new connections are reported."""

REMEDY = "raise the hard limit (ulimit -Hn; LimitNOFILE in a systemd unit; `--ulimit nofile` of a container)"


def raise_limit(needed: int = OTHER_FILES) -> None:
    """Raise the soft limit to the hard one: `ray start` and shells often leave 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:
            logger.warning("cannot raise the limit of open files from %d to %d: %s", soft, hard, error)
    if too_few(soft, needed):
        logger.warning(
            "this process may open %d files, but may need %d, so it may refuse connections; %s", soft, needed, REMEDY
        )


def too_few(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def report_few_left(transport: asyncio.BaseTransport) -> None:
    """Log a warning if a new connection's descriptor is close to the limit of open files.

    At the limit, libuv accepts and closes each new connection without an error (`uv__emfile_trick`
    in libuv's src/unix/stream.c).
    """
    connection = transport.get_extra_info("socket")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if connection is not None and too_few(limit, connection.fileno() + FEW):
        logger.warning(
            "this process has opened nearly all of the %d files that it may, and closes further connections; %s",
            limit,
            REMEDY,
        )
