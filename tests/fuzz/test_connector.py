"""A short campaign of each kind in every run of the suite; `fuzz-connector` runs the long one."""

from contextlib import closing

import pytest

from tests.campaigns.fuzz.connector import ACTIONS, KINDS, Campaign

ROUNDS = 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_campaign(kind: str) -> None:
    """After every twenty hostile inputs a transfer is right, and nothing leaks."""
    with closing(Campaign(4, *KINDS[kind])) as one:
        report = one.run(ROUNDS)
    assert report.transfers == ROUNDS + 1
    assert sum(report.actions.values()) >= ROUNDS * ACTIONS
