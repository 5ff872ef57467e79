"""Output of the launcher to its terminal."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from app.start_screen import stage_line


class Screen:
    """Output of the launcher. `quiet` sends all other output of this process to a file."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._out: TextIO = sys.stdout
        self._err: TextIO = sys.stderr

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def stage(self, text: str) -> None:
        self.line(stage_line(text, self.elapsed_s))

    def say(self, text: str) -> None:
        self.line(f"tandem: {text}")

    def line(self, text: str) -> None:
        self._print(text, self._out)

    def error(self, text: str) -> None:
        self._print(text, self._err)

    def _print(self, text: str, stream: TextIO) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            encoding = stream.encoding or "ascii"
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)

    def quiet(self, log: Path) -> None:
        """Redirect stdout and stderr of this process to `log`, including Ray's C++ output."""
        self._out, self._err = (os.fdopen(os.dup(stream), "w") for stream in (1, 2))
        with log.open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
