"""A producer and a consumer process on one fabric, for benchmarks of the layers below vLLM.

Both run NIXL agents as the connector's workers do. The parent sends each process one command at a
time, so several pairs (of different settings) can alternate on one machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import xxhash

from connectors.planning.blocks import Ints
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region

HOST = MemoryKind("DRAM", 0)
ANSWER_S = 600.0
REST_S = 0.001


FABRICS = {
    "shared memory": {"UCX_NET_DEVICES": "lo"},
    "TCP loopback": {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"},
}
"""Variables of UCX by the fabric's name."""


class Side:
    """Cache of one end: ``layers`` layers of ``blocks`` pages of ``page_bytes``, registered with
    our transport.
    """

    def __init__(self, name: str, page_bytes: int, blocks: int, layers: int) -> None:
        from connectors.transport.nixl import NixlTransport

        self.memory = np.zeros((layers, blocks, page_bytes), np.uint8)
        pages = LayerPages("", 0, page_bytes, 1, 1, page_bytes, 1, page_bytes, page_bytes, "benchmark")
        every = tuple(
            replace(pages, layer=f"layers.{k}", address=layer.ctypes.data) for k, layer in enumerate(self.memory)
        )
        self.regions = tuple(Region(layer.ctypes.data, layer.nbytes, HOST) for layer in self.memory)
        self.layout = EngineLayout(0, 1, blocks, self.regions, (Group(0, GroupKind.FULL, 1, None, every),))
        self.transport = NixlTransport(name)
        self.transport.register(self.layout.regions)

    def digest(self, ids: Ints) -> str:
        """Return the content of the named blocks of all layers, in order."""
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.memory[:, ids]).data)

    def close(self) -> None:
        self.transport.close()


class Agent:
    """A NIXL agent as vLLM's connector creates it, over the memory of a ``Side``."""

    def __init__(self, name: str, side: Side) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.nixl = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        regions = [(r.address, r.length_bytes, 0, "") for r in side.regions]
        self._registered = self.nixl.register_memory(regions, "DRAM")

    def add_peer(self, metadata: bytes) -> str:
        peer = self.nixl.add_remote_agent(metadata)
        return peer.decode() if isinstance(peer, bytes) else peer

    def close(self) -> None:
        self.nixl.deregister_memory(self._registered)


class Target(Side):
    """Consumer's end: does what an idle worker's progress thread does during a transfer."""

    def __init__(self, *shape: int) -> None:
        super().__init__(f"consumer-{os.getpid()}-{shape[0]}", *shape)
        self.made = self.transport.metadata(), self.layout

    def idle(self) -> None:
        self.transport.notifications()

    def digest(self, ids: Ints) -> str:
        """Return the digest of the received bytes, and clear them for the next transfer."""
        found = super().digest(ids)
        self.memory[:] = 0
        return found


def work(make: Callable[..., Any], rest_s: float, pipe: Connection, environment: Mapping[str, str]) -> None:
    """Run one process: ``new`` creates its end and answers with ``end.made``; other commands are
    the end's methods. Between commands call its ``idle``, if it has one, every ``rest_s``.
    """
    # before the import of NIXL, which reads them
    os.environ.update(environment)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    end: Any = None
    while True:
        if hasattr(end, "idle") and not pipe.poll(rest_s):
            end.idle()
            continue
        word, *arguments = pipe.recv()
        if word in ("new", "stop") and end is not None:
            end.close()
            end = None
        if word == "stop":
            return
        if word == "new":
            end = make(*arguments)
            pipe.send(end.made)
        else:
            pipe.send(getattr(end, word)(*arguments))


class End:
    """A process that makes an end and answers commands."""

    def __init__(self, make: Callable[..., Any], rest_s: float, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(make, rest_s, theirs, environment))
        self._process.start()

    def ask(self, *command: Any) -> Any:
        """Return the answer to a command."""
        self._pipe.send(command)
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"{command[0]} took longer than {ANSWER_S:g} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"a process of the pair ended during {command[0]!r}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(("stop",))
        self._process.join(20)
        self._process.kill()


class Pair:
    """Two processes; ``make``, which can be pickled, creates the producer's end."""

    def __init__(
        self,
        make: Callable[..., Any],
        fabric: str = "shared memory",
        environment: Mapping[str, str] | None = None,
        rest_s: float = REST_S,
    ) -> None:
        variables = FABRICS[fabric] | dict(environment or {})
        self.producer, self.consumer = (End(one, rest_s, variables) for one in (make, Target))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        self.producer.close()
        self.consumer.close()
