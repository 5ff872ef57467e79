"""Is there still a process behind an engine that does not answer?

A consumer's blocks stay allocated until each producer rank has said that it writes no more, or is known to be dead.
The kernel knows: where nothing listens on an engine's side channel any more, a connection is refused; and where another
engine start answers on its port, it has ended. A host that cannot be reached, or a process that is stopped, proves
nothing, and the blocks stay in quarantine until a supervisor's word.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable

from connectors.errors import StaleReferenceError, TandemError
from connectors.protocol.params import EngineAddress
from connectors.vllm_hma.complaints import Complaints
from connectors.vllm_hma.side_channel import fetch_card

logger = logging.getLogger(__name__)

# Between the first refusal and the second: an engine core's workers end a moment after it.
_CONFIRM_S = 2.0


class EngineProbe:
    """Probes the engines that it is told to watch, in a thread that lives only while there are some."""

    def __init__(
        self,
        timeout_s: float,
        identity: bytes,
        on_lost: Callable[[str, str], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._identity = identity
        self._on_lost = on_lost
        self._on_start = on_start
        self._lock = threading.Lock()
        self._watched: set[EngineAddress] = set()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._complain = Complaints(logger)

    def watch(self, engines: Iterable[EngineAddress]) -> None:
        """Replace the set of engines to probe, each at the address where it was met. Cheap when nothing changes."""
        with self._lock:
            self._watched = set(engines)
            if self._watched and self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="tandem-probe", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        # `on_lost` sends messages.
        self._on_start()
        refused: set[EngineAddress] = set()
        while True:
            with self._lock:
                watched = set(self._watched)
                if not watched or self._closed.is_set():
                    self._thread = None
                    return
            refused = {engine for engine in watched if self._look(engine, engine in refused)}
            self._closed.wait(_CONFIRM_S)

    def _look(self, engine: EngineAddress, refused_before: bool) -> bool:
        """Whether the engine refuses; told when it does so again. One that cannot be probed keeps no other from it."""
        try:
            refuses = _gone(engine, self._timeout_s, self._identity)
            if refuses and refused_before:
                self._on_lost(engine.incarnation, "the prefill engine's process is gone")
            return refuses
        except Exception as error:
            shown = f"{engine.incarnation[:80]!r} at {engine.host[:80]!r}"
            self._complain("broken", f"prefill engine {shown} cannot be probed: {error!r}")
            return refused_before


def _gone(engine: EngineAddress, timeout_s: float, identity: bytes) -> bool:
    try:
        socket.create_connection((engine.host, engine.port), timeout=timeout_s).close()
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    with contextlib.suppress(TandemError):
        try:
            fetch_card(engine.host, engine.port, engine.incarnation, timeout_s, identity)
        except StaleReferenceError:
            return True
    return False
