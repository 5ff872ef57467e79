"""Render a kustomization like kustomize, for the features that k8s/ uses; refuse all others.

The package indexes of the tests have no kustomize. `resources`, `components` and JSON patches (RFC
6902, with an exact target) have one meaning only; `make manifests-kustomize` compares with
kustomize itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Manifest = dict[str, Any]

_KEYS = {"apiVersion", "kind", "resources", "components", "patches"}
_KINDS = {"Kustomization": "kustomize.config.k8s.io/v1beta1", "Component": "kustomize.config.k8s.io/v1alpha1"}
_TARGET = {"group", "version", "kind", "name"}


class KustomizeError(Exception):
    """A kustomization that kustomize would refuse, or with features unknown to this renderer."""


def render(directory: Path) -> list[Manifest]:
    """Return all manifests of the kustomization in `directory`."""
    return _accumulate(directory, [], "Kustomization")


def _accumulate(directory: Path, given: list[Manifest], kind: str) -> list[Manifest]:
    """Return `given` with the additions of `directory`, patched."""
    kustomization = _load(directory, kind)
    manifests = list(given)
    for name in kustomization.get("resources", []):
        path = directory / name
        manifests += _accumulate(path, [], "Kustomization") if path.is_dir() else _manifests(path)
        _refuse_doubles(manifests, path)
    for name in kustomization.get("components", []):
        manifests = _accumulate(directory / name, manifests, "Component")
    for patch in kustomization.get("patches", []):
        manifests = _patched(manifests, directory, patch)
    return manifests


def _load(directory: Path, kind: str) -> dict[str, Any]:
    path = directory / "kustomization.yaml"
    try:
        kustomization = yaml.safe_load(path.read_text())
    except OSError as error:
        raise KustomizeError(f"{path}: {error.strerror}") from None
    if (kustomization.get("kind"), kustomization.get("apiVersion")) != (kind, _KINDS[kind]):
        raise KustomizeError(f"{path}: must be a {kind} of {_KINDS[kind]}")
    unknown = set(kustomization) - _KEYS
    if unknown:
        raise KustomizeError(f"{path}: {', '.join(sorted(unknown))}: this renderer has no such feature")
    return kustomization


def _manifests(path: Path) -> list[Manifest]:
    try:
        return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]
    except OSError as error:
        raise KustomizeError(f"{path}: {error.strerror}") from None


def _refuse_doubles(manifests: list[Manifest], path: Path) -> None:
    seen: set[tuple[str, ...]] = set()
    for one in manifests:
        key = (one["apiVersion"], one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"])
        if key in seen:
            raise KustomizeError(f"{path}: {one['kind']} {one['metadata']['name']} occurs twice")
        seen.add(key)


def _patched(manifests: list[Manifest], directory: Path, patch: dict[str, Any]) -> list[Manifest]:
    if set(patch) != {"path", "target"} or not set(patch["target"]) <= _TARGET:
        raise KustomizeError(f"{directory}: a patch must have a path and a target of {', '.join(sorted(_TARGET))}")
    operations = yaml.safe_load((directory / patch["path"]).read_text())
    if not isinstance(operations, list):
        raise KustomizeError(f"{directory / patch['path']}: must be a list of JSON patch operations")
    hits = [_matches(one, patch["target"]) for one in manifests]
    if not any(hits):
        raise KustomizeError(f"{directory / patch['path']}: nothing matches {patch['target']}")
    try:
        return [
            jsonpatch.apply_patch(one, operations) if hit else one for one, hit in zip(manifests, hits, strict=True)
        ]
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
        raise KustomizeError(f"{directory / patch['path']}: {error}") from None


def _matches(manifest: Manifest, target: dict[str, str]) -> bool:
    group, _, version = manifest["apiVersion"].rpartition("/")
    own = {"group": group, "version": version, "kind": manifest["kind"], "name": manifest["metadata"]["name"]}
    return all(own[key] == value for key, value in target.items())
