"""Producer engines known to a consumer worker. Part of the state machine in ``consumer.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.planning.blocks import UnitShape
from connectors.protocol.actions import Digest, Forget, Send
from connectors.protocol.agent_metadata import NO_PROCESS, ProcessIdentity
from connectors.protocol.limits import TransferLimits, due
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Cancel, Peer


@dataclass(frozen=True, slots=True)
class Partner:
    """A producer rank that sends KV, or messages only, to this worker (``consumer_ranks``).

    ``unit_bytes``  bytes that the rank writes per unit of each group
    ``new_digest``  creates the digest of one transfer from this rank; None without integrity check
    ``met_at``      side channel address at which the handshake found the engine; None if unknown.
                    An address in a request proves nothing: another engine may answer there
    ``process``     process that posts the rank's writes
    ``was_seen``    whether this worker saw the process alive at the handshake: under the same
                    kernel, in the same pid and time namespaces
    """

    peer: Peer
    shapes: tuple[UnitShape, ...]
    unit_bytes: tuple[int, ...]
    new_digest: Callable[[], Digest] | None = None
    met_at: EngineAddress | None = None
    process: ProcessIdentity = NO_PROCESS
    was_seen: bool = False


@dataclass(frozen=True, slots=True)
class Suspect:
    """A worker whose proved death frees state of this worker: of a producer, blocks in quarantine
    to which it may write; of a consumer, transfers with a failed write. Then the owner calls
    ``worker_lost``.
    """

    peer: Peer
    process: ProcessIdentity
    was_seen: bool
    met_at: EngineAddress | None


class ProducerEngines:
    """Producer engines by incarnation, and the ``Cancel`` messages pending until a handshake.

    ``stale``     incarnations of known engines whose next request starts with a handshake
    ``releases``  transfers to cancel after the next handshake, and since when (seconds)
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self.partners: dict[str, tuple[Partner, ...]] = {}
        self.stale: set[str] = set()
        self.releases: dict[str, list[tuple[str, float]]] = {}
        # Ordered by last use, the longest unused first.
        self._used_at: dict[str, float] = {}
        self._last_number = 0

    def reachable(self, incarnation: str) -> tuple[Partner, ...] | None:
        """None: a handshake is needed first."""
        return None if incarnation in self.stale else self.partners.get(incarnation)

    def touch(self, incarnation: str, now: float) -> None:
        self._used_at.pop(incarnation, None)
        self._used_at[incarnation] = now

    def connected(self, incarnation: str, partners: Sequence[Partner], now: float) -> None:
        self.partners[incarnation] = tuple(partners)
        self.stale.discard(incarnation)
        self.touch(incarnation, now)

    def connect_failed(self, incarnation: str) -> None:
        self.releases.pop(incarnation, None)
        self.mark_stale(incarnation)

    def mark_stale(self, incarnation: str) -> None:
        if incarnation in self.partners:
            self.stale.add(incarnation)

    def forget(self, incarnation: str) -> list[Forget]:
        self._used_at.pop(incarnation, None)
        self.stale.discard(incarnation)
        return [Forget(partner.peer) for partner in self.partners.pop(incarnation, ())]

    def unused(self, now: float) -> list[str]:
        """Engines without a ``touch`` for forget_s / 2; earlier requests may depend on them."""
        return due(self._used_at, lambda at: now - at >= self._limits.forget_s / 2)

    def release(self, transfer_id: str, incarnation: str, now: float) -> list[Send]:
        """Return a Cancel for every partner, or leave it to ``send_releases`` after a handshake."""
        partners = self.reachable(incarnation)
        if partners is None:
            self.release_later(transfer_id, incarnation, now)
            return []
        number = self.next_number()
        return [Send(partner.peer, Cancel(transfer_id, number)) for partner in partners]

    def release_later(self, transfer_id: str, incarnation: str, now: float) -> None:
        """Cancel the transfer after the next handshake, if it succeeds within lease_s."""
        self.releases.setdefault(incarnation, []).append((transfer_id, now))

    def send_releases(self, incarnation: str, now: float) -> list[Send]:
        waiting = self.releases.pop(incarnation, [])
        return [send for transfer_id, _ in waiting for send in self.release(transfer_id, incarnation, now)]

    def drop_releases(self, now: float) -> None:
        """After lease_s, the producer's lease ends their transfers instead."""
        for incarnation, waiting in list(self.releases.items()):
            self.releases[incarnation] = [item for item in waiting if now - item[1] < self._limits.lease_s]
            if not self.releases[incarnation]:
                del self.releases[incarnation]

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def knows(self, peer: Peer) -> bool:
        return any(partner.peer == peer for partner in self.partners.get(peer.incarnation, ()))

    def addresses(self) -> set[EngineAddress]:
        return {each.met_at for known in self.partners.values() for each in known if each.met_at is not None}
