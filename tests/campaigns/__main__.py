"""Run a campaign, or all that decide a release.

python -m tests.campaigns                             list the campaigns
python -m tests.campaigns differential ONLY=plain     one of them, with options
python -m tests.campaigns release ONLY="identity fuzz" WHOLE=1
"""

from __future__ import annotations

import sys

from tests.campaigns.registry import CAMPAIGNS
from tests.campaigns.release import Release
from tests.campaigns.runner import run


def main(words: list[str]) -> int:
    if not words:
        print(__doc__)
        for one in CAMPAIGNS.values():
            size = "" if one.release is None else f" (release: {' '.join(one.release) or 'as it is'})"
            print(f"  {one.name:20} {one.minutes:3g} min  {one.purpose}{size}")
        return 0
    name, *options = words
    if name == "release":
        given = dict(word.split("=", 1) for word in options)
        return Release(given.get("ONLY", "").split(), bool(given.get("WHOLE"))).run()
    if name not in CAMPAIGNS:
        print(f"no campaign {name}; `python -m tests.campaigns` lists them", file=sys.stderr)
        return 2
    return run(name, CAMPAIGNS[name].function(), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
