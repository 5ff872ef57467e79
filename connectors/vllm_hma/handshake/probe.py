"""Check whether suspect workers are dead, so that blocks in quarantine can be freed.

These blocks stay until each prefill worker that may write to them has acknowledged that it writes
no more, or its process is proved dead (docs/decisions/0025): the kernel of the worker's host must
report the end twice, at least CONFIRM_S apart:

    this host     this process saw the worker's process alive at the handshake, and now sees that
                  it has ended (``processes.py``)
    otherwise     the side channel of the worker's engine, or of another prefill engine of the same
                  host, reports that the process has ended

A prefill worker watches decode workers of its host in the same way, to forget failed transfers. A
refused or broken connection and a silent peer prove nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from connectors.errors import TandemError
from connectors.protocol.engines import Suspect
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Peer
from connectors.vllm_hma.handshake.processes import Liveness, liveness
from connectors.vllm_hma.handshake.side_channel import ask_liveness

logger = logging.getLogger(__name__)

# Minimum time between the two reports of a proof, in seconds. Bytes in a dead process's sockets
# arrive meanwhile.
CONFIRM_S = 2.0
_MAX_WITNESSES = 16


@dataclass(eq=False, repr=False)
class WorkerProbe:
    """Probe of the watched workers, in a thread that runs only while workers are watched.

    ``timeout_s``  time limit of a request to one other engine, in seconds
    ``identity``   key for the side channels of other engines (``Keys.identity``)
    ``on_lost``    called in this thread at each probe of a dead worker, with the reason
    ``on_start``   called first in this thread, to prepare it
    """

    timeout_s: float
    identity: bytes
    on_lost: Callable[[Peer, str], None]
    on_start: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: frozenset[Suspect] = frozenset()
        self._witnesses: frozenset[EngineAddress] = frozenset()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def watch(self, suspects: Iterable[Suspect], witnesses: Iterable[EngineAddress]) -> None:
        with self._lock:
            self._watched, self._witnesses = frozenset(suspects), frozenset(witnesses)
            if self._watched and self._thread is None and not self._closed.is_set():
                thread = threading.Thread(target=self._run, name="tandem-probe", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    logger.warning("Tandem: cannot start to probe workers, trying again: %s", error)
                    return
                self._thread = thread

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        try:
            # `on_lost` calls NIXL to send messages, so this thread needs its device.
            self.on_start()
        except Exception as error:
            logger.warning("Tandem: cannot start to probe workers, trying again: %r", error)
            with self._lock:
                self._thread = None
            return
        gone: set[Suspect] = set()
        while True:
            with self._lock:
                watched, witnesses = self._watched, self._witnesses
                if not watched or self._closed.is_set():
                    self._thread = None
                    return
            gone = {suspect for suspect in watched if self._probe(suspect, suspect in gone, witnesses)}
            self._closed.wait(CONFIRM_S)

    def _probe(self, suspect: Suspect, gone_before: bool, witnesses: frozenset[EngineAddress]) -> bool:
        """Return whether the process has ended; if it had ended before, too, call ``on_lost``."""
        try:
            gone = self._is_gone(suspect, witnesses)
            if gone and gone_before:
                self.on_lost(suspect.peer, "the worker's process has ended")
            return gone
        except Exception as error:
            logger.warning("Tandem: cannot probe worker %s, trying again: %r", suspect.peer, error)
            return gone_before

    def _is_gone(self, suspect: Suspect, witnesses: frozenset[EngineAddress]) -> bool:
        if suspect.was_seen:
            return liveness(suspect.process) is Liveness.GONE
        if suspect.met_at is None or not suspect.process.host:
            return False
        # Copies of a virtual machine share a boot id, but not an address.
        near = [address for address in witnesses if address.host == suspect.met_at.host]
        for address in [suspect.met_at, *near][:_MAX_WITNESSES]:
            with contextlib.suppress(TandemError):
                found = ask_liveness(address.host, address.port, suspect.process, self.timeout_s, self.identity)
                if found is not Liveness.UNKNOWN:
                    return found is Liveness.GONE
        return False
