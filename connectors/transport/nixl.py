"""Transport over NIXL. Besides this module, only ``selftest.py`` imports nixl in the product.

NIXL's own progress thread is off, because it spins and takes a core per worker, idle or not. The
owner calls ``poll`` and ``notifications`` often enough for writes and messages to progress
(docs/decisions/0003). NIXL's errors become TransportErrors, except those of ``metadata``; errors
while a peer, a write or memory is released are ignored.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t, nixl_xfer_handle

from connectors.errors import ConfigurationError, FailedWriteError, TransportError
from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind, Region

# Without this, UCX blocks every NIXL call while it opens a TCP connection: for minutes if a host
# does not answer. UCX_TCP_CONN_NB in the environment overrides it.
_PARAMETERS = {"UCX": {"engine_config": "TCP_CONN_NB=y"}}


class NixlTransport:
    """A NIXL agent. NIXL's error classes cannot be imported by name: this catches any Exception."""

    kind = "nixl"

    def __init__(self, name: str, backends: Sequence[str] = ("UCX",), devices: Sequence[str] = ()) -> None:
        """Raises ConfigurationError for a backend that this NIXL build lacks, and TransportError.

        ``devices``  UCX names of the network devices to use, for all transports that this process
                     creates from now on; empty: those of UCX's environment variables, else all
        """
        self.name = name
        if devices:
            # With NIXL's parameter `ucx_devices`, UCX still listens on all devices.
            os.environ["UCX_NET_DEVICES"] = ",".join(devices)
        try:
            self._agent: nixl_agent | None = nixl_agent(
                name,
                nixl_agent_config(
                    enable_prog_thread=False,
                    backends=[],
                    # Handshake threads add peers while the engine's thread or the progress thread
                    # writes.
                    sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
                ),
            )
        except Exception as error:
            raise TransportError(name, f"NIXL could not start: {error}") from error
        known = self._agent.get_plugin_list()
        missing = [backend for backend in backends if backend not in known]
        if missing:
            raise ConfigurationError(
                f"transfer.backends (kv_connector_extra_config: backends): NIXL has no backend {', '.join(missing)}; "
                f"available are {', '.join(known)}"
            )
        try:
            for backend in backends:
                self._agent.create_backend(backend, _PARAMETERS.get(backend, {}))
        except Exception as error:
            raise TransportError(name, f"NIXL could not start with backends {list(backends)}: {error}") from error
        self._registered: list[object] = []
        self._handles: dict[int, tuple[str, nixl_xfer_handle]] = {}
        self._metadata: dict[str, bytes] = {}
        self._next_handle = 0
        # A peer must not be removed and added again between the preparation and the post of a
        # write to it.
        self._connections = threading.Lock()

    def register(self, regions: Sequence[Region]) -> None:
        agent = self._live()
        for memory in sorted({region.memory_kind.memory for region in regions}):
            ranges = [
                (r.address, r.length_bytes, r.memory_kind.device, "") for r in regions if r.memory_kind.memory == memory
            ]
            try:
                self._registered.append(agent.register_memory(ranges, memory))
            except Exception as error:
                raise TransportError(self.name, f"cannot register {len(ranges)} {memory} regions: {error}") from error

    def metadata(self) -> bytes:
        return bytes(self._live().get_agent_metadata())

    def add_peer(self, metadata: bytes, name: str | None = None) -> str:
        agent = self._live()
        try:
            peer = _text(agent.add_remote_agent(metadata))
        except Exception as error:
            raise TransportError(name or "?", f"NIXL rejects its metadata: {error}") from error
        if name is not None and peer != name:
            # Keep a peer added earlier: NIXL refuses a second connection under a known name.
            if peer not in self._metadata:
                self.remove_peer(peer)
            raise TransportError(name, f"the metadata belongs to agent {peer[:80]!r}")
        self._metadata[peer] = metadata
        return peer

    def reconnect(self, peer: str) -> None:
        with self._connections:
            if any(owner == peer for owner, _ in list(self._handles.values())):
                raise TransportError(peer, "cannot reconnect while a write to this peer is in flight")
            metadata = self._metadata.get(peer)
            if metadata is None:
                raise TransportError(peer, "its metadata has not been added")
            self.remove_peer(peer)
            try:
                self.add_peer(metadata)
            except TransportError as error:
                # Keep the metadata: the next attempt needs it.
                self._metadata[peer] = metadata
                raise TransportError(peer, f"cannot reconnect: {error}") from error

    def remove_peer(self, peer: str) -> None:
        self._metadata.pop(peer, None)
        with contextlib.suppress(Exception):
            self._live().remove_remote_agent(peer)

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        with self._connections:
            return self.post(peer, self.prepare(peer, runs, source, target))

    def prepare(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> nixl_xfer_handle:
        """Raises as ``write``."""
        agent = self._live()
        try:
            local = agent.get_xfer_descs(_descriptors(runs.src, runs.length, source.device), source.memory)
            remote = agent.get_xfer_descs(_descriptors(runs.dst, runs.length, target.device), target.memory)
            return agent.initialize_xfer("WRITE", local, remote, peer)
        except Exception as error:
            raise TransportError(peer, f"cannot prepare a write of {len(runs)} runs: {error}") from error

    def post(self, peer: str, xfer: nixl_xfer_handle) -> int:
        """Start a prepared write and return its handle for ``poll``.

        Raises FailedWriteError, and releases ``xfer``, if the post fails. NIXL does not report how
        much was posted: a post that fails midway only requests the cancellation of earlier puts
        (``nixlUcxEngine::sendXferRange``, ``nixlUcxBackendReqH::release`` in ``ucx_backend.cpp``).
        """
        agent = self._live()
        try:
            state = agent.transfer(xfer)
        except Exception as error:
            self.discard(xfer)
            raise FailedWriteError(peer, f"posting a write failed: {error}") from error
        if state == "ERR":
            self.discard(xfer)
            raise FailedWriteError(peer, "posting a write failed: NIXL reports its state as ERR")
        self._next_handle += 1
        self._handles[self._next_handle] = (peer, xfer)
        return self._next_handle

    def poll(self, handle: int) -> bool:
        agent = self._live()
        peer, xfer = self._handles[handle]
        try:
            state = agent.check_xfer_state(xfer)
        except Exception as error:
            del self._handles[handle]
            self.discard(xfer)
            raise FailedWriteError(peer, f"a write failed: {error}") from error
        if state == "PROC":
            return False
        del self._handles[handle]
        self.discard(xfer)
        if state == "ERR":
            raise FailedWriteError(peer, "a write failed: NIXL reports its state as ERR")
        return True

    def notify(self, peer: str, payload: bytes) -> None:
        agent = self._live()
        try:
            agent.send_notif(peer, payload)
        except Exception as error:
            raise TransportError(peer, f"cannot send a message of {len(payload)} bytes: {error}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        agent = self._live()
        try:
            inbox = agent.get_new_notifs()
        except Exception as error:
            raise TransportError(self.name, f"cannot read messages: {error}") from error
        return [(_text(peer), payload) for peer, payloads in inbox.items() for payload in payloads]

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for _, xfer in list(self._handles.values()):
            self.discard(xfer)
        self._handles.clear()
        for descriptors in self._registered:
            with contextlib.suppress(Exception):
                agent.deregister_memory(descriptors)

    def _live(self) -> nixl_agent:
        if self._agent is None:
            raise TransportError(self.name, "this transport has been closed")
        return self._agent

    def discard(self, xfer: nixl_xfer_handle) -> None:
        # Releasing an unfinished write starts its abort and raises; NIXL then releases it itself.
        with contextlib.suppress(Exception):
            xfer.release()


def _descriptors(address: np.ndarray, length: np.ndarray, device: int) -> np.ndarray:
    """Rows of (address, bytes, device): shape (N, 3), uint64."""
    table = np.empty((len(address), 3), np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = address, length, device
    return table


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
