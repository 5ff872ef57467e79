"""Output of the launcher during a start: few lines for many replicas."""

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from actors.engine.startup.start_log import STAGES, EngineReport
from configs.settings.base import ROLES, RoleName
from configs.settings.service import ServiceSettings

FIRST_REMINDER_S = 30.0
"""Seconds without a new stage before the first reminder of the pending stages.

The interval doubles with each reminder.
"""

MAX_ERROR_LINES = 12
LABEL_WIDTH = 66


@dataclass(frozen=True)
class StartFailure:
    """Cause of a failed start, for the end of the output. ``log`` is a file or a directory."""

    what: str
    error: str
    log: str

    def __str__(self) -> str:
        lines = self.error.strip().splitlines() or ["the cause is unknown"]
        where = [f"tandem: full log: {self.log}"] if self.log else []
        return "\n".join([f"tandem: {self.what}", *lines[:MAX_ERROR_LINES], *where])


def stage_line(text: str, elapsed_s: float) -> str:
    return f"tandem: {text:<{LABEL_WIDTH}} {elapsed_s:6.1f} s"


def replicas_at_start(settings: ServiceSettings) -> dict[RoleName, int]:
    models = settings.each_model().values()
    return {role: sum(replicas_of(one.role(role).replicas) for one in models) for role in ROLES}


def replicas_of(replicas: int | Mapping[str, object]) -> int:
    if isinstance(replicas, int):
        return replicas
    return int(str(replicas.get("initial_replicas") or replicas.get("min_replicas") or 1))


class EngineStages:
    """One line per stage that all initial replicas of a role have reached, or a reminder."""

    def __init__(self, replicas: Mapping[RoleName, int]) -> None:
        self._replicas = replicas
        self._printed: dict[str, int] = dict.fromkeys(replicas, 0)
        self._reminded_at = 0.0
        self._reminder_s = FIRST_REMINDER_S

    def advance(self, reports: Iterable[EngineReport], elapsed_s: float, waiting_for: str = "") -> list[str]:
        """Return the lines to print now: stages reached since the last call, or a reminder.

        `waiting_for` is Serve's message about replicas that it has not scheduled, or "".
        """
        reports = list(reports)
        lines = []
        for role, replicas in self._replicas.items():
            reached = sorted((STAGES.index(one.stage) for one in reports if one.role == role), reverse=True)
            if len(reached) < replicas:
                continue
            of_all = reached[replicas - 1]
            suffix = f" ({replicas} replicas)" if replicas > 1 else ""
            lines += [
                stage_line(f"{role}: {stage}{suffix}", elapsed_s) for stage in STAGES[self._printed[role] : of_all + 1]
            ]
            self._printed[role] = max(self._printed[role], of_all + 1)
        if lines:
            self._reminded_at = elapsed_s
        elif elapsed_s - self._reminded_at >= self._reminder_s:
            self._reminded_at = elapsed_s
            self._reminder_s *= 2
            lines = [stage_line(f"still starting: {self._awaited(waiting_for)}", elapsed_s)]
        return lines

    def _awaited(self, waiting_for: str) -> str:
        if waiting_for:
            return waiting_for
        states = {role: STAGES[printed - 1] if printed else "scheduling" for role, printed in self._printed.items()}
        return ", ".join(f"{role}: {stage}" for role, stage in states.items() if stage != "ready") or "router"


def failure_of(reports: Iterable[EngineReport], messages: Mapping[str, str], logs: str) -> StartFailure:
    """Return the failure to print: the first report with an error, else the first of `messages`.

    ``messages``  Serve's messages by what failed: `deployment NAME` or `service`
    """
    for report in reports:
        if report.error is not None:
            return StartFailure(f"{report.role} engine did not start:", report.error, report.log or logs)
    what, message = next(((what, text) for what, text in messages.items() if text.strip()), ("service", ""))
    return StartFailure(f"{what} did not start:", last_error(message), logs)


def last_error(message: str) -> str:
    """Return the exception after the last traceback in Serve's message or in a log."""
    lines = message.rstrip().splitlines()
    indented = [number for number, line in enumerate(lines) if line.startswith((" ", "\t"))]
    end = lines[indented[-1] + 1 :] if indented and indented[-1] + 1 < len(lines) else lines[-1:]
    return "\n".join(end)


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
