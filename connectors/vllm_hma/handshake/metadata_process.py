"""Runs the side channel in its own process, outside the engine core's interpreter lock.

The engine core writes the agent metadata to the process's standard input and keeps it open. The
process ends when that pipe closes, also if the core is killed.

    to the process    length (uint32) | JSON: host, port, identity (hex), lengths by rank | metadata
    from the process  one line of JSON: port, or error
"""

from __future__ import annotations

import json
import logging
import os
import select
import struct
import subprocess
import sys
from typing import BinaryIO

from connectors.errors import ConfigurationError
from connectors.vllm_hma.handshake.side_channel import MetadataServer

_LENGTH = struct.Struct("<I")
_START_S = 60.0
_END_S = 5.0
# Lower priority than the engine's processes.
_NICE = 5


class MetadataProcess:
    """Serves one engine's agent metadata until ``close``.

    ``port``  listening port

    Raises ConfigurationError if it cannot listen.
    """

    def __init__(self, host: str, port: int, rank_metadata: list[bytes], identity: bytes = b"") -> None:
        header = {
            "host": host,
            "port": port,
            "identity": identity.hex(),
            "lengths": [len(agent_metadata) for agent_metadata in rank_metadata],
        }
        encoded = json.dumps(header).encode()
        # The process imports the package from the engine's sys.path. It needs no thread pools.
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        try:
            self._pipe.write(_LENGTH.pack(len(encoded)) + encoded + b"".join(rank_metadata))
            self._pipe.flush()
            answer = self._answer()
        except BaseException:
            self.close()
            raise
        self.port = int(answer["port"])

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if not self._pipe.closed:
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
            raise ConfigurationError("the side channel process did not start; see the engine's log for its error")
        answer: dict[str, int] = json.loads(line)
        if "error" in answer:
            raise ConfigurationError(str(answer["error"]))
        return answer


def serve() -> None:
    """Run the side channel until standard input closes. Entry point of the process."""
    os.nice(_NICE)
    logging.basicConfig(format="%(levelname)s %(asctime)s [%(name)s] %(message)s", datefmt="%m-%d %H:%M:%S")
    source, out = sys.stdin.buffer, sys.stdout
    (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
    header = json.loads(source.read(length))
    rank_metadata = [source.read(size) for size in header["lengths"]]
    try:
        # No pacing: this process has no other work that a flood could delay.
        server = MetadataServer(
            header["host"], header["port"], rank_metadata, bytes.fromhex(header["identity"]), pace_s=0.0
        )
    except ConfigurationError as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
        return
    print(json.dumps({"port": server.port}), file=out, flush=True)
    source.read()
    server.close()


if __name__ == "__main__":
    serve()
