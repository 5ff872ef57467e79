"""Both machines in a thousand random schedules; ``make schedules`` runs any number.

To replay one: ``python -m tests.campaigns.schedules.schedules --replay SEED``.
"""

from collections import Counter

import pytest

from tests.campaigns.schedules.schedules import play

SCHEDULES = 1000
BATCHES = 10


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    """Events of all schedules, by kind."""
    return Counter()


@pytest.mark.parametrize("batch", range(BATCHES))
def test_promises_hold(batch: int, totals: Counter[str]) -> None:
    """Right or refused, every wait ends, nothing leaks: in every schedule."""
    counts, broken = play(range(batch, SCHEDULES, BATCHES))
    totals += counts
    assert not broken, "\n".join(broken[:10])


def test_schedules_have_seen_everything(totals: Counter[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The schedules cover all kinds: every message, fault and ending has occurred often."""
    with capsys.disabled():
        print("\nsimulated:", ", ".join(f"{count} {what}" for what, count in sorted(totals.items())))
    assert totals["schedules"] == SCHEDULES
    for what in (
        "offer",
        "fin",
        "cancel",
        "cancelled",
        "aborted",
        "alive",
        "dropped",
        "failed writes",
        "preemptions",
        "discards",
        "layers that left early",
        "damaged blocks",
        "bad digests",
        "good digests",
        "partial digests",
        "prefill engines started again",
        "decode engines started again",
        "forgotten consumers",
        "forgotten producers",
        "unsent",
        "dropped peers",
    ):
        assert totals[what] > SCHEDULES // 50, what
    assert min(totals["requests that got their KV"], totals["requests that did not"]) > SCHEDULES // 5
