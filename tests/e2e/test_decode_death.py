"""Real decode engines that die in mid-stream: a cut of `make streams`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.service.decode_deaths import Decodes, service_with_two_decodes, stream_with_a_death, whole_stream

pytestmark = pytest.mark.engine(killed=True)

TOKENS, AT_EVENT = 1000, 120
"""A short stream could end before a busy client has seen the event at which it kills the engine."""


def test_a_stream_outlives_its_engine(tmp_path: Path) -> None:
    """An engine core is killed; the stream says what the uninterrupted one says. `make streams` kills actors, too."""
    with service_with_two_decodes(tmp_path) as (service, http):
        whole = whole_stream(http, "penalties", TOKENS)
        death = stream_with_a_death(http, Decodes(service, http), "penalties", AT_EVENT, "core", whole, TOKENS)
        assert (death.exact, death.resumed, death.gone) == (True, True, True), death
