"""Compare our rendering of `k8s/` with kustomize's: `make manifests-kustomize`.

Needs `kustomize` or `kubectl` on the path. Not a test: the tests' package indexes have neither.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.k8s.check import DIRECTORIES
from tests.k8s.kustomize import Manifest, render


def by_kustomize(directory: Path) -> list[Manifest]:
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    rendered = subprocess.run([*command, str(directory)], check=True, stdout=subprocess.PIPE, text=True).stdout
    return list(yaml.safe_load_all(rendered))


def main() -> int:
    if not (shutil.which("kustomize") or shutil.which("kubectl")):
        print("neither kustomize nor kubectl is on the path", file=sys.stderr)
        return 2
    differing = []
    for directory in DIRECTORIES:
        same = _sorted(render(directory)) == _sorted(by_kustomize(directory))
        print(f"{directory}: {'the same' if same else 'DIFFERENT'}")
        if not same:
            differing.append(directory)
    return 1 if differing else 0


def _sorted(manifests: list[Manifest]) -> list[Manifest]:
    """Kustomize has its own order, which has no meaning for the API server."""
    return sorted(manifests, key=lambda one: (one["kind"], one["metadata"]["name"]))


if __name__ == "__main__":
    sys.exit(main())
