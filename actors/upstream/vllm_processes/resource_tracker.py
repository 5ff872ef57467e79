"""Start Python's resource tracker as a daemon, so that it outlives a Ray actor.

The tracker unlinks the shared memory of killed processes when all processes that use it have ended:
160 MiB in `/dev/shm` for an engine core of vLLM. Python starts it as a child of the actor, and Ray
kills the children of an actor that exits, but not daemons
(https://docs.ray.io/en/latest/ray-core/user-spawn-processes.html).
"""

import logging
import os
import subprocess
from multiprocessing import resource_tracker, spawn
from typing import Any

logger = logging.getLogger(__name__)

_START = """
import os
from multiprocessing.resource_tracker import main
if not os.fork():
    main({fd})
"""


def detach_resource_tracker() -> None:
    """Start one tracker for this process and its children, unless it has one.

    If that fails, log a warning; Python then starts the tracker itself.
    """
    tracker: Any = resource_tracker._resource_tracker  # noqa: SLF001
    reader, writer = os.pipe()
    try:
        if tracker._fd is None:  # noqa: SLF001
            command = [os.fsdecode(spawn.get_executable()), "-c", _START.format(fd=reader)]
            subprocess.run(command, pass_fds=[reader], start_new_session=True, check=True)
            # As in a process with an inherited tracker (`spawn_main` in multiprocessing/spawn.py).
            tracker._fd = os.dup(writer)  # noqa: SLF001
    except (AttributeError, OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "a killed engine will leave its shared memory in /dev/shm, because its resource tracker did not start: %r",
            error,
        )
    finally:
        os.close(reader)
        os.close(writer)
