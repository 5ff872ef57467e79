"""Real decode engines that die in mid-stream: a part of `make streams`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.campaigns.service.decode_deaths import Decodes, service_with_two_decodes, stream_with_a_death, whole_stream

pytestmark = [
    pytest.mark.engine(killed=True),
    pytest.mark.skipif("TANDEM_STREAMS" not in os.environ, reason="takes a minute: `make streams`"),
]

TOKENS, AT_EVENT = 1000, 120
"""A short stream could end before a busy client has read the event at which it kills the engine."""


def test_a_stream_outlives_its_engine(tmp_path: Path) -> None:
    """After the death of an engine core, the resumed stream equals the uninterrupted one.

    `make streams` kills actors as well.
    """
    with service_with_two_decodes(tmp_path) as (service, http):
        whole = whole_stream(http, "penalties", TOKENS)
        death = stream_with_a_death(http, Decodes(service, http), "penalties", AT_EVENT, "core", whole, TOKENS)
        assert (death.exact, death.resumed, death.gone) == (True, True, True), death
