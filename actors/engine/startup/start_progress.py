"""Report an engine's start to the launcher (`app/run.py`) through Ray's control store.

The launcher cannot call an actor during its constructor, and may run on another node. Engines write
reports only between `StartWatch.open` and `StartWatch.close`.
"""

import contextlib
import json
import logging
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from actors.engine.startup.start_log import STAGES, EngineReport, Stage, root_cause, stage_of
from actors.errors import EngineStartError
from actors.process import link_logs, own_logs
from actors.upstream import ray_private

logger = logging.getLogger(__name__)

WATCHED = b"start"
"""Key that exists from a launcher's `StartWatch.open` until `StartWatch.close`."""
PREFIX = b"start/"

POLL_S = 0.25
MAX_LOG_BYTES = 4 << 20
"""Maximum number of bytes, at the end of each log, in which `root_cause` searches."""


class StartProgress:
    """Context manager of an engine's start: links its logs, and reports its stages or failure.

    An Exception in the block becomes EngineStartError with the cause.
    """

    def __init__(self, role: str, replica: str) -> None:
        self._role = role
        self._replica = replica
        self._logs = own_logs()
        self._begins = {path: path.stat().st_size for path in self._logs}
        self._stage: Stage = STAGES[0]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="start-progress", daemon=True)

    def __enter__(self) -> "StartProgress":
        link_logs(self._logs, f"{self._role}-{self._replica}")
        self._put()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is None:
            self._stage = "ready"
            self._put()
        elif isinstance(error, Exception):
            cause = self._cause(error)
            self._put(error=cause)
            where = f"\nfull log: {self.log}" if self._logs else ""
            raise EngineStartError(f"the {self._role} engine did not start: {cause}{where}") from error

    @property
    def log(self) -> str:
        """Path of the link to the stdout log, beside stderr's; "" without a log file."""
        return str(self._logs[-1].with_name(f"{self._role}-{self._replica}.out")) if self._logs else ""

    def _cause(self, error: Exception) -> str:
        """Return the cause in the logs (`root_cause`), stderr's first; else the text of `error`."""
        texts = [_tail(path, self._begins[path]) for path in self._logs]
        return next(filter(None, map(root_cause, texts)), None) or f"{type(error).__name__}: {error}"

    def _follow(self) -> None:
        with contextlib.ExitStack() as stack:
            files = []
            for path in self._logs:
                file = stack.enter_context(path.open(encoding="utf-8", errors="replace"))
                file.seek(self._begins[path])
                files.append(file)
            while not self._ended.wait(POLL_S):
                for file in files:
                    for line in file:
                        stage = stage_of(line)
                        # Several ranks log the same stage.
                        if stage is not None and STAGES.index(stage) > STAGES.index(self._stage):
                            self._stage = stage
                            self._put()

    def _put(self, error: str | None = None) -> None:
        report = asdict(EngineReport(self._role, self._stage, error, self.log))
        try:
            if ray_private.store_exists(WATCHED):
                key = PREFIX + f"{self._role}/{self._replica}".encode()
                ray_private.store_put(key, json.dumps(report).encode())
        except Exception as problem:  # a failed report must not stop the engine
            logger.warning(
                "cannot report this engine's start to the launcher, which may show an earlier stage: %r", problem
            )


class StartWatch:
    def open(self) -> None:
        ray_private.store_put(WATCHED, b"")

    def reports(self) -> list[EngineReport]:
        values = map(ray_private.store_get, ray_private.store_keys(PREFIX))
        return [EngineReport(**json.loads(value)) for value in values if value]

    def close(self) -> None:
        ray_private.store_delete(WATCHED)
        ray_private.store_delete(PREFIX, by_prefix=True)


def _tail(path: Path, begin: int) -> str:
    with path.open("rb") as file:
        file.seek(max(begin, path.stat().st_size - MAX_LOG_BYTES))
        return file.read().decode(errors="replace")
