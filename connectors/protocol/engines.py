"""Producer engines that a consumer worker has met. Part of ``consumer.py``, which has the table."""

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
    """One producer rank that talks to this worker; ``unit_bytes[g]`` is what it sends for a unit of group g.

    ``new_digest`` makes the digest of one transfer from it, over our memory; None where none is to be asked for.
    ``met_at`` is where its engine was met, None where nobody shook hands. A request may name the engine with another
    address, and who answers there, or nobody, says nothing about this one. ``process`` is the one that writes, and
    ``was_seen`` whether this worker's own kernel had it then.
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
    """A producer worker that keeps blocks in quarantine: is its process dead? As in its ``Partner``."""

    peer: Peer
    process: ProcessIdentity
    was_seen: bool
    met_at: EngineAddress | None


class ProducerEngines:
    """Producer engines by incarnation, and the Cancels that wait for a handshake with one.

    ``partners``   ranks of each engine that this worker has met
    ``stale``      engines whose ranks are known, but whose next request begins with a handshake
    ``releases``   transfers to cancel after the next handshake, each with the time of its release
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self.partners: dict[str, tuple[Partner, ...]] = {}
        self.stale: set[str] = set()
        self.releases: dict[str, list[tuple[str, float]]] = {}
        # From the engine that has been unused longest to the one used last.
        self._used_at: dict[str, float] = {}
        self._last_number = 0

    def reachable(self, incarnation: str) -> tuple[Partner, ...] | None:
        """Return the engine's ranks, or None where a handshake must come first."""
        return None if incarnation in self.stale else self.partners.get(incarnation)

    def touch(self, incarnation: str, now: float) -> None:
        """Record that a request uses the engine."""
        self._used_at.pop(incarnation, None)
        self._used_at[incarnation] = now

    def connected(self, incarnation: str, partners: Sequence[Partner], now: float) -> None:
        """The handshake has succeeded. ``releases`` stay until ``send_releases``."""
        self.partners[incarnation] = tuple(partners)
        self.stale.discard(incarnation)
        self.touch(incarnation, now)

    def mark_stale(self, incarnation: str) -> None:
        """Make the next request for a known engine begin with a handshake."""
        if incarnation in self.partners:
            self.stale.add(incarnation)

    def forget(self, incarnation: str) -> list[Forget]:
        """Remove the engine; its next request begins with a handshake."""
        self._used_at.pop(incarnation, None)
        self.stale.discard(incarnation)
        return [Forget(partner.peer) for partner in self.partners.pop(incarnation, ())]

    def unused(self, now: float) -> list[str]:
        """Return the engines that no request has used for forget_s / 2."""
        return due(self._used_at, lambda at: now - at >= self._limits.forget_s / 2)

    def release(self, transfer_id: str, incarnation: str, now: float) -> list[Send]:
        """Cancel the transfer at every rank, at once or after the next handshake, so that its lease ends early."""
        partners = self.reachable(incarnation)
        if partners is None:
            self.release_later(transfer_id, incarnation, now)
            return []
        number = self.next_number()
        return [Send(partner.peer, Cancel(transfer_id, number)) for partner in partners]

    def release_later(self, transfer_id: str, incarnation: str, now: float) -> None:
        """Cancel the transfer after the next handshake, if that comes within lease_s."""
        self.releases.setdefault(incarnation, []).append((transfer_id, now))

    def send_releases(self, incarnation: str, now: float) -> list[Send]:
        """Cancel the transfers that waited for this handshake."""
        waiting = self.releases.pop(incarnation, [])
        return [send for transfer_id, _ in waiting for send in self.release(transfer_id, incarnation, now)]

    def drop_releases(self, now: float) -> None:
        """Drop the Cancels that have waited for lease_s: the producer holds nothing for them any more."""
        for incarnation, waiting in list(self.releases.items()):
            self.releases[incarnation] = [item for item in waiting if now - item[1] < self._limits.lease_s]
            if not self.releases[incarnation]:
                del self.releases[incarnation]

    def next_number(self) -> int:
        """Return the number of the next Offer, AwaitStart or Cancel: one ascending series over all engines."""
        self._last_number += 1
        return self._last_number

    def knows(self, peer: Peer) -> bool:
        """Return whether this worker has met the rank and has not forgotten its engine."""
        return any(partner.peer == peer for partner in self.partners.get(peer.incarnation, ()))

    def addresses(self) -> set[EngineAddress]:
        """Return the addresses at which the known engines were met."""
        return {each.met_at for known in self.partners.values() for each in known if each.met_at is not None}
