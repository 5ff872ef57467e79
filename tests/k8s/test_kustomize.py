"""The renderer supports some of kustomize's features, and refuses the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.kustomize import KustomizeError, render

HEAD = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
COMPONENT = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}, "data": {"a": "1"}}
TARGET = {"version": "v1", "kind": "ConfigMap", "name": "one"}


def write(folder: Path, **files: Any) -> Path:
    """`a__b="…"` becomes the file a/b.yaml."""
    for name, content in files.items():
        path = folder / (name.replace("__", "/") + ".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content))
    return folder


def test_an_overlay_of_a_base_with_a_component(tmp_path: Path) -> None:
    """The renderer applies resources, then components, then the overlay's own patches."""
    write(
        tmp_path,
        base__kustomization=HEAD | {"resources": ["map.yaml"]},
        base__map=MAP,
        extra__kustomization=COMPONENT | {"patches": [{"path": "patch.yaml", "target": TARGET}]},
        extra__patch=[{"op": "replace", "path": "/data/a", "value": "2"}],
        top__kustomization=HEAD
        | {
            "resources": ["../base"],
            "components": ["../extra"],
            "patches": [{"path": "patch.yaml", "target": {"kind": "ConfigMap"}}],
        },
        top__patch=[{"op": "test", "path": "/data/a", "value": "2"}, {"op": "add", "path": "/data/b~1c", "value": "3"}],
    )
    assert render(tmp_path / "top") == [MAP | {"data": {"a": "2", "b/c": "3"}}]


@pytest.mark.parametrize(
    ("kustomization", "message"),
    [
        ({"namePrefix": "x-"}, "namePrefix: this renderer has no such feature"),
        ({"resources": ["map.yaml", "map.yaml"]}, "ConfigMap one occurs twice"),
        ({"resources": ["mapp.yaml"]}, "No such file"),
        ({"kind": "Component"}, "must be a Kustomization"),
        ({"patches": [{"path": "patch.yaml"}]}, "must have a path and a target"),
        ({"patches": [{"path": "patch.yaml", "target": TARGET | {"name": "two"}}]}, "nothing matches"),
        ({"patches": [{"path": "patch.yaml", "target": TARGET}]}, "patch.yaml"),
        ({"patches": [{"path": "map.yaml", "target": TARGET}]}, "must be a list of JSON patch operations"),
    ],
)
def test_what_is_refused(tmp_path: Path, kustomization: dict[str, Any], message: str) -> None:
    """The renderer raises an error instead of guessing."""
    write(
        tmp_path,
        kustomization=HEAD | {"resources": ["map.yaml"]} | kustomization,
        map=MAP,
        patch=[{"op": "replace", "path": "/data/b", "value": "2"}],
    )
    with pytest.raises(KustomizeError, match=message):
        render(tmp_path)
