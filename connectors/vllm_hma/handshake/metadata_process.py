"""Run the side channel in its own process, outside the engine core's interpreter lock.

The core writes the agent metadata to the process's standard input and keeps it open: the process
ends when that pipe closes, also if the core is killed. If it ends before, the core starts it again
on the same port: no further decode engine could connect.

    to the process    one line of JSON: host, port, identity (hexadecimal), agent metadata by rank
    from the process  one line of JSON: the listening port, or an error
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
from typing import BinaryIO

from connectors.errors import ConfigurationError
from connectors.logs import log_to
from connectors.open_files import OTHER_FILES, raise_limit
from connectors.vllm_hma.handshake.side_channel import MetadataServer

logger = logging.getLogger(__name__)

_START_S = 60.0
_END_S = 5.0
_RESTART_S = 1.0
_NICE = 5


class MetadataProcess:
    """Raises ConfigurationError if the process reports no port, and OSError."""

    def __init__(self, host: str, port: int, rank_metadata: list[bytes], identity: bytes = b"") -> None:
        self._host = host
        self._rank_metadata = rank_metadata
        self._identity = identity
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.port = self._start(port)
        threading.Thread(target=self._restart, name="tandem-side-channel-owner", daemon=True).start()

    def _start(self, port: int) -> int:
        header = {
            "host": self._host,
            "port": port,
            "identity": self._identity.hex(),
            "rank_metadata": [agent_metadata.decode() for agent_metadata in self._rank_metadata],
        }
        # The process imports the package from the engine's sys.path. It needs no thread pools.
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=1,  # the engine's log
            env=environment,
        )
        try:
            # If the process has ended, `_answer` raises.
            with contextlib.suppress(BrokenPipeError):
                self._pipe.write(json.dumps(header).encode() + b"\n")
                self._pipe.flush()
            return int(self._answer()["port"])
        except BaseException:
            self._end()
            raise

    def _restart(self) -> None:
        while True:
            status = self._process.wait()
            if self._closing.wait(_RESTART_S):
                return
            logger.error("Tandem: the side channel process ended with status %d; starting it again", status)
            with self._lock:
                if self._closing.is_set():
                    return
                try:
                    self._start(self.port)
                except Exception:  # the next round tries again
                    logger.exception("Tandem: the side channel process could not be started; trying again")

    def close(self) -> None:
        """Stop the side channel process. Idempotent."""
        self._closing.set()
        if self._lock.locked():
            self._process.kill()  # it is being started again; the start must not delay this call
        with self._lock:
            self._end()

    def _end(self) -> None:
        if not self._pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                self._pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def _pipe(self) -> BinaryIO:
        assert self._process.stdin is not None
        return self._process.stdin  # type: ignore[return-value]

    def _answer(self) -> dict[str, int]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise ConfigurationError(
                "the side channel process ended or did not start in time; see the engine's log for its error"
            )
        answer: dict[str, int] = json.loads(line)
        if "error" in answer:
            raise ConfigurationError(str(answer["error"]))
        return answer


def serve() -> None:
    os.nice(_NICE)
    log_to(sys.stderr, "SideChannel")
    raise_limit(OTHER_FILES)
    source, out = sys.stdin.buffer, sys.stdout
    header = json.loads(source.readline())
    rank_metadata = [agent_metadata.encode() for agent_metadata in header["rank_metadata"]]
    try:
        server = MetadataServer(header["host"], header["port"], rank_metadata, bytes.fromhex(header["identity"]))
    except ConfigurationError as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
        return
    print(json.dumps({"port": server.port}), file=out, flush=True)
    source.read()
    server.close()


if __name__ == "__main__":
    serve()
