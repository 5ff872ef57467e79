"""Find the stage of an engine's start and the cause of a failure in the engine's log. Does no I/O.

The engine core and its workers log both, but do not report them to the process that starts vLLM.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["importing vLLM", "engine core", "loading weights", "KV cache", "ready"]
STAGES: tuple[Stage, ...] = ("importing vLLM", "engine core", "loading weights", "KV cache", "ready")

STAGE_MESSAGES: dict[str, Stage] = {
    "Initializing a V1 LLM engine": "engine core",  # vllm/v1/engine/core.py
    "Starting to load model ": "loading weights",  # vllm/v1/worker/{cpu,gpu}_model_runner.py, load_model
    "KV cache size: ": "KV cache",  # vllm/v1/core/kv_cache_utils.py
}
"""Stages that vLLM's log shows, by a part of the first message of the stage."""

MAX_CAUSE_LINES = 8

_WRAPPERS = ("Engine core initialization failed", "WorkerProc initialization failed", "Executor failed")
"""Errors of vLLM that only refer to the log of another process."""

# Beginning of a line of vLLM's log: "(EngineCore pid=1) ERROR 01-31 12:00:00 [core.py:1] text".
# Lines of Python's warnings and of Ray have other formats.
_RECORD = re.compile(r"^\((?P<process>[^)]*pid=\d+)\) (?P<level>[A-Z]+) (?P<when>[\d-]+ [\d:]+) \[(?P<where>[^]]*)\] ?")
_EXCEPTION = re.compile(
    r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Timeout)\b(: |$)|^[a-z_][\w.]*\.[A-Z]\w*: "
)


@dataclass(frozen=True)
class EngineReport:
    """Stage or failure of one engine's start. ``log`` is a path; empty without a log file."""

    role: str
    stage: Stage
    error: str | None = None
    log: str = ""


def stage_of(line: str) -> Stage | None:
    for message, stage in STAGE_MESSAGES.items():
        if message in line:
            return stage
    return None


@dataclass
class _Record:
    """Consecutive error lines of one process from one line of its source: usually one log call."""

    key: tuple[str, str, str]
    lines: list[str]


def root_cause(log: str) -> str | None:
    """Return the first exception that a process logged as an error, or None.

    It is taken for the cause of a failed start: a worker logs before the engine core, the engine
    core before the process that started it. Skips exceptions that only refer to another log
    (`_WRAPPERS`). Of chained exceptions, the result is the last.
    """
    for record in _error_records(log.splitlines()):
        cause = _last_exception(record.lines)
        if cause is not None and not any(wrapper in cause for wrapper in _WRAPPERS):
            return cause
    return None


def _error_records(lines: Iterable[str]) -> list[_Record]:
    records: list[_Record] = []
    latest: dict[str, _Record] = {}
    for line in lines:
        found = _RECORD.match(line)
        if found is None or found["level"] not in ("ERROR", "CRITICAL"):
            continue
        key = (found["process"], found["level"], found["where"])
        record = latest.get(found["process"])
        # Lines of several processes alternate; a process may log several tracebacks.
        if record is None or record.key != key:
            record = _Record(key, [])
            latest[found["process"]] = record
            records.append(record)
        record.lines.append(line[found.end() :])
    return records


def _last_exception(lines: list[str]) -> str | None:
    starts = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
    if not starts:
        return None
    message: list[str] = []
    for line in lines[starts[-1] :]:
        if line.startswith("Traceback ") or len(message) == MAX_CAUSE_LINES:
            break
        message.append(line.rstrip())
    return "\n".join(message).rstrip()
