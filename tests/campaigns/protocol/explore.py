"""Every interleaving of small transfers; fails if a promise breaks."""

from __future__ import annotations

from tests.campaigns.protocol.lists import quick, thorough
from tests.campaigns.protocol.search import explore as explored
from tests.campaigns.runner import Report


def explore(report: Report, *, part: str = "1/1", only: str = "") -> None:
    """``part`` i/n of what `make test` leaves out, and all of what it explores; ``only``: a part of
    a scenario's name.
    """
    number, parts = map(int, part.split("/"))
    for scenario in [*quick(), *list(thorough())[number - 1 :: parts]]:
        if only in scenario.name:
            with report.case(scenario.name):
                found = explored(scenario)
                report.row(scenario=scenario.name, states=found.states, steps=found.steps, seconds=found.seconds)
