"""MultiConnector over TandemConnector and vLLM's ExampleConnector: a part of `multi-connector`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.service.multi_connector import Case, plain_answers, problems

pytestmark = pytest.mark.engine


def test_metrics_account_for_every_request(tmp_path: Path) -> None:
    answers = plain_answers(12, tmp_path)
    assert problems(tmp_path, Case(), answers) == []
