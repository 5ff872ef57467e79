"""Requests that share one transfer: the choices of a client request (``n``), to each of which vLLM
copies the transfer parameters. The first one to arrive receives the KV. Its followers wait until
the transfer has ended. Then they find the prompt in the prefix cache, or compute what it lacks
(docs/decisions/0056).
"""

from __future__ import annotations

REMEMBERED_TRANSFERS = 4096
"""Requests that share an id arrive shortly after each other."""


class SharedTransfers:
    """The receiving request of each transfer, and for which one each follower waits."""

    def __init__(self) -> None:
        # By transfer id, of the latest REMEMBERED_TRANSFERS ids. Ended transfers stay, because a
        # follower may arrive late.
        self._receivers: dict[str, str] = {}
        self._followers: dict[str, str] = {}

    def join(self, transfer_id: str, request_id: str) -> bool:
        """Return whether this request receives the KV."""
        receiver = self._receivers.setdefault(transfer_id, request_id)
        if len(self._receivers) > REMEMBERED_TRANSFERS:
            del self._receivers[next(iter(self._receivers))]
        if receiver != request_id:
            self._followers[request_id] = receiver
        return receiver == request_id

    def receiver_of(self, request_id: str) -> str | None:
        return self._followers.get(request_id)

    def left(self, request_id: str) -> None:
        self._followers.pop(request_id, None)
