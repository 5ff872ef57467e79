"""Prepare the launcher's environment, which Ray's processes and the engines inherit."""

import math
import os
import pwd
import tempfile
from pathlib import Path

from configs.settings.base import SettingsError

KEPT = {"RAY_AUTH_TOKEN_PATH": ".ray/auth_token", "HF_HOME": ".cache/huggingface"}


OBJECT_STORE_BYTES = 128 * 2**20
"""Ray's object store in shared memory. Ray's minimum is 75 MiB; Tandem puts nothing into it.

Without a size, Ray takes 30% of the memory, in `/tmp` if shared memory is smaller.
"""

ENGINE_QUEUE_BYTES = 160 * 2**20
"""Size of the shared memory between vLLM's engine core and its workers: ten chunks of 16 MiB.

See `max_chunks` in vllm/distributed/device_communicators/shm_broadcast.py and
VLLM_MQ_MAX_CHUNK_BYTES_MB.
"""


def shared_memory(engines: int, path: str = "/dev/shm") -> tuple[str, str]:
    """Return the free and the needed shared memory, and the remedy if it is too little, else ""."""
    needed = OBJECT_STORE_BYTES + engines * ENGINE_QUEUE_BYTES
    state = os.statvfs(path)
    free = state.f_bavail * state.f_frsize
    what = f"{path}: {free / 2**20:,.0f} MiB free; Ray and {engines} engines need {needed / 2**20:,.0f} MiB"
    size = f"{math.ceil(needed / 2**30)}g"
    return what, "" if free >= needed else f"enlarge {path} (docker run --shm-size={size}, an emptyDir)"


def prepare_environment() -> str | None:
    """Make Python processes use UTF-8, and choose a home directory that can be written.

    Return a message if HOME has changed, else None. Raises SettingsError if none can be written.
    """
    os.environ["PYTHONUTF8"] = "1"  # libraries read files in the encoding of the locale
    if not has_name() and not any(os.environ.get(name) for name in ("LOGNAME", "USER")):
        os.environ["USER"] = str(os.getuid())  # `getpass.getuser` would raise
    problem = home_problem()
    if problem is None:
        return None
    found, home = Path(os.path.expanduser("~")), own_directory(problem)
    for variable, path in KEPT.items():
        if os.access(found / path, os.R_OK):
            os.environ.setdefault(variable, str(found / path))
    os.environ["HOME"] = str(home)
    return f"{problem}; Ray's token and the libraries' caches go to {home}"


def home_problem() -> str | None:
    home = os.path.expanduser("~")
    if home == "~":
        return "HOME is not set, and this user has no entry in the password database"
    if not os.path.isdir(home):
        return f"HOME: {home} is not a directory"
    return None if os.access(home, os.W_OK | os.X_OK) else f"HOME: {home} cannot be written"


def ray_temporary_directory() -> str:
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def has_name() -> bool:
    try:
        return bool(pwd.getpwuid(os.getuid()))
    except KeyError:
        return False


def own_directory(problem: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"tandem-home-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        raise SettingsError(
            f"{problem}; {folder} cannot be used: {error.strerror}; set HOME to a directory of the user"
        ) from None
    if state.st_uid != os.getuid() or state.st_mode & 0o77 or not folder.is_dir():
        raise SettingsError(f"{problem}; {folder} is not a private directory of this user; set HOME to one")
    return folder
