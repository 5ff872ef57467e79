"""Thread that compares the digests of received KV with those of its producers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from connectors.protocol.actions import Verify

logger = logging.getLogger(__name__)


class Verifier:
    """Carries out ``Verify`` actions in order, delaying neither steps nor answers.

    ``set_device``  called in the thread before each comparison; if it raises, the comparison fails
    ``verified``    called in the thread with the action, the problem (None if the digests match)
                    and the start of the comparison in ``time.monotonic()`` seconds

    Raises RuntimeError if the thread cannot start.
    """

    def __init__(self, set_device: Callable[[], None], verified: Callable[[Verify, str | None, float], None]) -> None:
        self._set_device = set_device
        self._verified = verified
        # The pool has no initializer: a failed initializer would make the pool refuse all work.
        self._pool = ThreadPoolExecutor(1, "tandem-verify")
        # Start the thread now: a later submission that cannot start it would never run.
        self._pool.submit(set_device)

    def submit(self, verify: Verify) -> None:
        """No effect after ``close``."""
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._verify, verify)

    def close(self) -> None:
        """Drop the comparisons that have not started, and wait for the one that runs."""
        self._pool.shutdown(cancel_futures=True)

    def _verify(self, verify: Verify) -> None:
        started_at = time.monotonic()
        try:
            self._set_device()
            problem = verify.problem()
        except Exception as error:
            logger.exception("Tandem: cannot verify the KV of transfer %s, so the transfer fails", verify.transfer_id)
            problem = f"computing the digest failed: {error!r}"
        self._verified(verify, problem, started_at)
