"""Run promtool over the alerts and their tests, for `make alerts`.

    python -m tests.campaigns.manifests.promtool

Needs `promtool` on the path (Debian's package `prometheus`): no package index has it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tests.k8s.check import ROOT, only
from tests.k8s.kustomize import render

TESTS = Path(__file__).parents[2] / "k8s" / "alerts.yaml"


def main() -> int:
    if not shutil.which("promtool"):
        print("promtool is not on the path; Debian: apt-get install prometheus", file=sys.stderr)
        return 2
    (rule,) = only(render(ROOT / "overlays" / "gpu"), "PrometheusRule")
    with tempfile.TemporaryDirectory() as folder:
        rules, tests = Path(folder) / "rules.yaml", Path(folder) / "alerts.yaml"
        rules.write_text(yaml.safe_dump(rule["spec"]))
        tests.write_text(TESTS.read_text())
        checked = subprocess.run(["promtool", "check", "rules", str(rules)], check=False).returncode
        return checked or subprocess.run(["promtool", "test", "rules", str(tests)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
