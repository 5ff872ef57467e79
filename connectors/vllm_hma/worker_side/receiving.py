"""Received KV of one rank: the blocks that a transfer fills, and the digests of their bytes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from connectors.planning.blocks import wanted_blocks
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.actions import Verify
from connectors.protocol.reception import Order
from connectors.vllm_hma.orders import Receive

logger = logging.getLogger(__name__)


def order_of(receive: Receive, groups: Sequence[Group]) -> Order:
    """Return the order for the blocks that the transfer fills: windows, states, and full attention
    from ``loaded_token``, up to which the KV store has loaded it. Raises PlanError.
    """
    loaded_token = max(receive.start_token, receive.loaded_token)
    wanted = tuple(
        wanted_blocks(
            group, table, loaded_token if group.kind is GroupKind.FULL else receive.start_token, receive.end_token
        )
        for group, table in zip(groups, receive.tables, strict=True)
    )
    return Order(
        receive.request_id, receive.transfer_id, receive.producer, receive.end_token, receive.prompt_digest, wanted
    )


class Verifier:
    """Compares digests of received KV in a thread of its own, in order.

    ``on_verified``  called in this thread with the problem, or None, and the seconds that it took
    """

    def __init__(
        self, set_device: Callable[[], None], on_verified: Callable[[Verify, str | None, float], None]
    ) -> None:
        self._set_device = set_device
        self._on_verified = on_verified
        # No initializer: a failed one would make the pool refuse all work.
        self._pool = ThreadPoolExecutor(1, "tandem-verify")
        # Start the thread now: a later submission that cannot start it would never run.
        self._pool.submit(set_device)

    def submit(self, verify: Verify) -> None:
        with contextlib.suppress(RuntimeError):  # after ``close``
            self._pool.submit(self._run, verify)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _run(self, verify: Verify) -> None:
        started_at = time.monotonic()
        try:
            self._set_device()
            problem = verify.problem()
        except Exception as error:
            logger.exception("Tandem: cannot verify the KV of transfer %s, so the transfer fails", verify.transfer_id)
            problem = f"computing the digest failed: {error!r}"
        self._on_verified(verify, problem, time.monotonic() - started_at)
