"""Merge what k8s/ uses of kustomize: resources, components, JSON patches with an exact target.

`test_manifests.py` compares it with kubectl's rendering where there is a kubectl, which no package
index of the tests has. The campaign `manifests` checks kubectl's rendering.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Manifest = dict[str, Any]
FEATURES = {"apiVersion", "kind", "resources", "components", "patches"}


def by_kubectl(directory: Path) -> list[Manifest] | None:
    """Return kubectl's rendering, or None without a kubectl. Raises CalledProcessError."""
    if not shutil.which("kubectl"):
        return None
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", str(directory)]
    return list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def render(directory: Path, given: list[Manifest] | None = None) -> list[Manifest]:
    """Return the manifests of a kustomization, or those of a component applied to ``given``."""
    file = yaml.safe_load((directory / "kustomization.yaml").read_text(encoding="utf-8"))
    assert file.keys() <= FEATURES, f"{directory}: {file.keys() - FEATURES}: only kubectl renders this"
    manifests = list(given or [])
    for path in (directory / name for name in file.get("resources", ())):
        manifests += render(path) if path.is_dir() else yaml.safe_load_all(path.read_text(encoding="utf-8"))
    for name in file.get("components", ()):
        manifests = render(directory / name, manifests)
    for patch in file.get("patches", ()):
        hits = [one for one in manifests if _matches(one, patch["target"])]
        assert hits, f"{directory / patch['path']}: nothing matches {patch['target']}"
        operations = yaml.safe_load((directory / patch["path"]).read_text(encoding="utf-8"))
        manifests = [jsonpatch.apply_patch(one, operations) if one in hits else one for one in manifests]
    return manifests


def _matches(manifest: Manifest, target: dict[str, str]) -> bool:
    group, _, version = manifest["apiVersion"].rpartition("/")
    own = {"group": group, "version": version, "kind": manifest["kind"], "name": manifest["metadata"]["name"]}
    return all(own[key] == value for key, value in target.items())
