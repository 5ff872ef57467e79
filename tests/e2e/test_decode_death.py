"""Real decode engines that die in mid-stream: a cut of `make streams`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.decode_deaths import Decodes, service_with_two_decodes, stream_with_a_death, whole_stream

pytestmark = pytest.mark.engine


def test_streams_outlive_their_engines(tmp_path: Path) -> None:
    """A core and an actor are killed; each stream says what the uninterrupted one says."""
    with service_with_two_decodes(tmp_path) as (service, http):
        decodes = Decodes(service, http)
        for kind, at_event, victim in (("penalties", 3, "actor"), ("chat", 9, "core")):
            whole = whole_stream(http, kind)
            death = stream_with_a_death(http, decodes, kind, at_event, victim, whole)
            assert (death.exact, death.resumed, death.gone) == (True, True, True), death
