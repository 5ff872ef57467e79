"""Print the part of a custom resource definition for the tests: `python -m tests.k8s.vendor
CRD.yaml`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml


def condensed(definition: dict[str, Any], version: str = "v1") -> dict[str, Any]:
    """Return group, kind, subresources and one version's schema, without descriptions and
    status.
    """
    spec = definition["spec"]
    (chosen,) = (one for one in spec["versions"] if one["name"] == version)
    schema = _bare(chosen["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    return {
        "group": spec["group"],
        "kind": spec["names"]["kind"],
        "version": version,
        "subresources": sorted(chosen.get("subresources", {})),
        "openAPIV3Schema": schema,
    }


def _bare(schema: Any) -> Any:
    """Remove descriptions; a property that is called `description` stays."""
    if isinstance(schema, dict):
        return {
            key: _bare(value) for key, value in schema.items() if key != "description" or not isinstance(value, str)
        }
    return [_bare(value) for value in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    definition = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(condensed(definition), separators=(",", ":"), sort_keys=True))
