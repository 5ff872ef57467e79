"""MultiConnector over TandemConnector and vLLM's ExampleConnector: right answers, and complete
metrics.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.service.multi_connector import ask, plain_answers, servers

pytestmark = pytest.mark.engine


def test_metrics_account_for_every_request(tmp_path: Path) -> None:
    """A part of ``tests/campaigns/service/multi_connector.py``, which sends 100 requests."""
    answers = plain_answers(12, tmp_path)
    with servers(tmp_path) as pair:
        outcome = ask(pair, 12, answers)
    assert not outcome.problems(), outcome
