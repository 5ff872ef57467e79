"""Requests that share one transfer: the choices of a client request (``n``).

vLLM copies the transfer parameters to the engine request of each choice. The first one receives the
KV. The others, its followers, wait until the transfer has ended and find the prompt in the engine's
prefix cache (docs/decisions/0056).
"""

from __future__ import annotations

REMEMBERED_TRANSFERS = 4096
"""Number of transfer ids whose receiving request is known. Requests that share one arrive
together."""


class SharedTransfers:
    """The receiver of each transfer, and the followers of receivers, by request id."""

    def __init__(self) -> None:
        # Also of transfers that have ended, because a follower may arrive late; the latest ones.
        self._receivers: dict[str, str] = {}
        self._followers: dict[str, str] = {}

    def join(self, transfer_id: str, request_id: str) -> bool:
        """Add a request of a transfer; return whether it is the one that receives the KV."""
        receiver = self._receivers.setdefault(transfer_id, request_id)
        if len(self._receivers) > REMEMBERED_TRANSFERS:
            del self._receivers[next(iter(self._receivers))]
        if receiver != request_id:
            self._followers[request_id] = receiver
        return receiver == request_id

    def receiver_of(self, request_id: str) -> str | None:
        """Return the request that receives the KV for a follower; None for other requests."""
        return self._followers.get(request_id)

    def left(self, request_id: str) -> None:
        """Forget a follower that has ended."""
        self._followers.pop(request_id, None)

    @property
    def followers(self) -> frozenset[str]:
        return frozenset(self._followers)
