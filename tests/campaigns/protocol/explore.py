"""Every interleaving of small transfers; fails if a promise breaks.

    python -m tests.campaigns.protocol.explore [--quick] [--part 1/6] [PART OF A NAME]

Prints the numbers of states.
"""

from __future__ import annotations

import argparse

from tests.campaigns.protocol.lists import quick, thorough
from tests.campaigns.protocol.search import explore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only what make test explores")
    parser.add_argument("--part", default="1/1", help="part i of n of what make test leaves out")
    parser.add_argument("name", nargs="?", default="", help="scenarios whose name has this in it")
    arguments = parser.parse_args()
    part, parts = (int(number) for number in arguments.part.split("/"))
    scenarios = [*quick(), *(() if arguments.quick else list(thorough())[part - 1 :: parts])]
    states = steps = 0
    for scenario in scenarios:
        if arguments.name in scenario.name:
            found = explore(scenario)
            states, steps = states + found.states, steps + found.steps
            print(
                f"{found.states:>10,} states {found.steps:>11,} steps {found.seconds:>7.1f} s  {scenario.name}",
                flush=True,
            )
    print(f"{states:>10,} states {steps:>11,} steps in all; no promise was broken")


if __name__ == "__main__":
    main()
