"""Validate manifests against the schemas of Kubernetes and of the custom resources.

Unknown fields are errors; the API server would silently drop them. Like the API server, this fills
in the defaults of a structural schema first (the definitions list defaulted fields as required),
then validates everything.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator, ValidationError

KUBERNETES = "1.37"
_SCHEMAS = Path(__file__).parent / "schemas"
_METADATA = {"name", "namespace", "labels", "annotations", "finalizers"}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return one line per wrong field; empty for a valid manifest."""
    definition = _definitions().get((manifest["apiVersion"], manifest["kind"]))
    if definition is None:
        return list(_core_problems(json.dumps(manifest)))
    custom = definition["openAPIV3Schema"]
    filled = copy.deepcopy(manifest)
    _fill_defaults(filled, custom)
    found = sorted(_validator(manifest["apiVersion"], manifest["kind"]).iter_errors(filled), key=_place)
    lines = [f"{_dotted(error.absolute_path)}: {_short(error.message)}" for error in found]
    return lines + list(_doubles(filled, custom, "")) + list(_metadata_problems(manifest))


def subresources(api_version: str, kind: str) -> list[str]:
    """Return which of `status` and `scale` a custom kind has."""
    return _definitions()[api_version, kind]["subresources"]


@cache
def _core_problems(manifest_json: str) -> tuple[str, ...]:
    """Cached: the package reads all of Kubernetes' schemas at each call."""
    manifest = json.loads(manifest_json)
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return (f"{_dotted(error.absolute_path)}: {_short(error.message)}",)
    except kubernetes_validate.SchemaNotFoundError:
        return (f"no schema for {manifest['apiVersion']} {manifest['kind']}",)
    return ()


def _place(error: ValidationError) -> list[str]:
    return [str(part) for part in error.absolute_path]


@cache
def _definitions() -> dict[tuple[str, str], dict[str, Any]]:
    loaded = [json.loads(path.read_text()) for path in sorted(_SCHEMAS.glob("*.json"))]
    return {(f"{one['group']}/{one['version']}", one["kind"]): one for one in loaded}


@cache
def _validator(api_version: str, kind: str) -> Draft202012Validator:
    return Draft202012Validator(_strict(_definitions()[api_version, kind]["openAPIV3Schema"]))


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the structural schema as a JSON schema in which an unknown field is an error."""
    out = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if "properties" in schema:
        out["properties"] = {key: _strict(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        out["additionalProperties"] = _strict(schema["additionalProperties"])
    if "items" in schema:
        out["items"] = _strict(schema["items"])
    if schema.get("nullable"):
        return {"anyOf": [{"type": "null"}, out]}
    return out


def _fill_defaults(value: Any, schema: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, inner in schema.get("properties", {}).items():
            if key not in value and "default" in inner:
                value[key] = copy.deepcopy(inner["default"])
            if key in value:
                _fill_defaults(value[key], inner)
        if isinstance(schema.get("additionalProperties"), dict):
            for inner_value in value.values():
                _fill_defaults(inner_value, schema["additionalProperties"])
    elif isinstance(value, list) and "items" in schema:
        for item in value:
            _fill_defaults(item, schema["items"])


def _doubles(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """Report items of a list that is a map to the API server (`env`, `ports`, …) with equal
    keys.
    """
    if isinstance(value, dict):
        for key, inner in schema.get("properties", {}).items():
            if key in value:
                yield from _doubles(value[key], inner, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        if keys:
            names = [tuple(item.get(key) for key in keys) for item in value]
            yield from (
                f"{where}: {name} occurs twice" for name in sorted({n for n in names if names.count(n) > 1}, key=str)
            )
        for number, item in enumerate(value):
            yield from _doubles(item, schema.get("items", {}), f"{where}.{number}")


def _metadata_problems(manifest: dict[str, Any]) -> Iterator[str]:
    """A custom resource's schema leaves `metadata` open; the API server does not."""
    yield from (f"metadata: {key!r} was unexpected" for key in manifest["metadata"] if key not in _METADATA)


def _dotted(path: Any) -> str:
    return ".".join(map(str, path)) or "(top)"


def _short(message: str) -> str:
    return message if len(message) < 300 else f"{message[:140]} … {message[-140:]}"
