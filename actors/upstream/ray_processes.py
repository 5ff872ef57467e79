"""Start Ray's processes in their own sessions, out of reach of signals to the launcher's group.

Ray blocks SIGINT in its processes. But SIGTERM to the launcher's group (`tini -g`) would end the
raylet, and with it the engines, before the launcher has drained them. Ray still ends its processes
with the launcher (PR_SET_PDEATHSIG). Source:
https://github.com/ray-project/ray/blob/ray-2.60.0/python/ray/_private/services.py
"""

from typing import Any

from ray._private import services


class _InOwnSession(services.ConsolePopen):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"start_new_session": True})


def start_in_own_sessions() -> None:
    """Make `ray.init`, in this process, start each process of a new node in its own session."""
    services.ConsolePopen = _InOwnSession
