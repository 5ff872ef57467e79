"""Prepare the launcher's environment, which Ray's processes and the engines inherit."""

import os
import pwd
import tempfile
from pathlib import Path

from configs.settings.base import SettingsError

KEPT = {"RAY_AUTH_TOKEN_PATH": ".ray/auth_token", "HF_HOME": ".cache/huggingface"}
"""Files of a read-only home directory that stay in use, by variable."""


def prepare_environment() -> str | None:
    """Make Python processes use UTF-8, and choose a home directory that can be written.

    Ray writes its token below HOME, vLLM and its libraries their caches. Return a message if HOME
    has changed, else None. Raises SettingsError if no directory can be written.
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
    """Return the reason why the home directory cannot be used, or None."""
    home = os.path.expanduser("~")
    if home == "~":
        return "HOME is not set, and this user has no entry in the password database"
    if not os.path.isdir(home):
        return f"HOME: {home} is not a directory"
    return None if os.access(home, os.W_OK | os.X_OK) else f"HOME: {home} cannot be written"


def has_name() -> bool:
    """Return whether the user of this process has an entry in the password database."""
    try:
        return bool(pwd.getpwuid(os.getuid()))
    except KeyError:
        return False


def own_directory(problem: str) -> Path:
    """Return this user's directory below the temporary directory; create it if necessary.

    Raises SettingsError, which begins with `problem`, if the directory cannot be created or another
    user can write it.
    """
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
