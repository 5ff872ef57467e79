"""Stock vLLM OpenAI servers that tests can kill, stop and restart at the same address.

Each is forked from the fork server and runs the main function of
``vllm.entrypoints.openai.api_server``. A server is a tree of processes: the API server, the engine
core, and one worker per tensor-parallel rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from actors.engine.startup.start_log import root_cause
from app.demo.paths import MODEL_DIR
from testing import fork_server
from testing.processes import free_cores
from testing.programs import Program, is_up, start_module

POOL_BLOCKS = 448
"""Number of KV blocks of each engine; small, so that another request soon reuses a freed block."""

MODEL = "demo"
# The CPU build has no working `vllm` command.
API_SERVER = "vllm.entrypoints.openai.api_server"


def start_vllm(
    log: Path, model: str, port: int, transfer: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Program:
    """Start a server of any model with a KV connector; ``Server`` has the demo model."""
    connector = ("--kv-transfer-config", json.dumps(transfer))
    return start_module(log, API_SERVER, *_arguments(model, port, 4096), *connector, environment=environment)


def _arguments(model: str, port: int, max_model_len: int) -> list[str]:
    return [
        *("--model", model, "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-batched-tokens", "256"),
        *("--max-model-len", str(max_model_len), "--max-num-seqs", "16", "--no-enable-prefix-caching"),
    ]


def _serve(argv: list[str], environment: dict[str, str], log: str) -> None:
    """Run a server in this process until the server ends; append its output to ``log``."""
    os.setsid()
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(sink, descriptor)
    os.environ.update({"VLLM_SERVER_DEV_MODE": "0"} | environment)
    sys.argv = ["api_server", *argv]
    from testing.preload import main

    main()


@dataclass
class Server:
    """One server.

    ``members``  processes of the current start by part: ``api``, ``core``, ``rank0``, …
    ``forked``   whether the server forks from the fork server; False: it starts as a module, and
                 vLLM spawns its processes, as on a GPU
    """

    name: str
    port: int
    tp_size: int
    folder: Path
    transfer: Mapping[str, object] | None
    environment: Mapping[str, str] = field(default_factory=dict)
    forked: bool = True
    starts: int = 0
    members: dict[str, psutil.Process] = field(default_factory=dict)
    _api: psutil.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}-{self.starts}.log"

    def start(self) -> None:
        """Start the server; call ``find_members`` once it answers."""
        self.starts += 1
        self.members = {}
        argv = [
            *_arguments(str(MODEL_DIR), self.port, 2048),
            *("--num-gpu-blocks-override", str(POOL_BLOCKS), "--tensor-parallel-size", str(self.tp_size)),
        ]
        if self.transfer is not None:
            argv += ["--kv-transfer-config", json.dumps(self.transfer)]
        if not self.forked:
            started = start_module(self.log, API_SERVER, *argv, environment=self.environment)
            self._api = psutil.Process(started.process.pid)
            return
        fork_server.prepare()
        process = fork_server.CONTEXT.Process(target=_serve, args=(argv, dict(self.environment), str(self.log)))
        process.start()
        # Keep the process id: a fork server that is ending no longer tracks its children.
        self._api = psutil.Process(process.pid)

    def wait_until_up(self, timeout_s: float = 240.0) -> None:
        """Wait until the server answers. Raises ``start_failure`` if it ends or time runs out."""
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            if self.has_ended:
                if not self.found_port_taken:
                    break
                # The kernel has not yet released the socket of the server that this one replaces.
                time.sleep(1.0)
                self.start()
            if is_up(f"{self.url}/health"):
                return
            time.sleep(0.1)
        raise self.start_failure()

    def start_failure(self) -> RuntimeError:
        log = self.log.read_text(errors="replace")
        return RuntimeError(f"{self.name} does not start: {root_cause(log) or log[-3000:]} (see {self.log})")

    @property
    def api(self) -> psutil.Process:
        assert self._api is not None, "start the server first"
        return self._api

    @property
    def has_ended(self) -> bool:
        return self._api is None or not _runs(self._api)

    @property
    def found_port_taken(self) -> bool:
        return "Address already in use" in self.log.read_text(errors="replace")

    def wait_end(self, timeout_s: float) -> None:
        """Wait until the API server has ended, for at most ``timeout_s``; then return anyway."""
        assert self._api is not None
        psutil.wait_procs([self._api], timeout_s)

    def find_members(self) -> None:
        """Find the processes of a server that answers; undo any pinning to one core."""
        assert self._api is not None
        self.members = {"api": self._api}
        for child in self._api.children():
            if "EngineCore" in " ".join(child.cmdline()):
                self.members["core"] = child
                self._find_workers(child)
        missing = {"core", *(f"rank{rank}" for rank in range(self.tp_size))} - self.members.keys()
        if missing:
            raise RuntimeError(f"{self.name}: no process for {', '.join(sorted(missing))} in {self.members}")
        free_cores([process.pid for process in self.members.values()])

    def _find_workers(self, core: psutil.Process) -> None:
        for child in core.children(recursive=True):
            title = " ".join(child.cmdline()).strip()
            if rank := re.search(r"Worker(?:_TP(\d+))?$", title):
                self.members[f"rank{rank[1] or 0}"] = child

    def processes(self, part: str) -> list[psutil.Process]:
        """Return the processes of a part (``members``); the part ``tree`` has all of them."""
        return list(self.members.values()) if part == "tree" else [self.members[part]]

    def signal(self, part: str, number: signal.Signals) -> None:
        for process in self.processes(part):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def alive(self) -> bool:
        """Return whether all processes of the tree exist, running or stopped."""
        return bool(self.members) and all(_runs(process) for process in self.members.values())

    def destroy(self) -> None:
        """Kill all remaining processes of the tree (SIGKILL) and wait for their end."""
        left = list(self.members.values())
        if self._api is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                left += [self._api, *self._api.children(recursive=True)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        until = time.monotonic() + 10
        while any(_runs(process) for process in left) and time.monotonic() < until:
            time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
