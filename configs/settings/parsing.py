"""Read settings from configurations. Errors name keys, and values that cannot be secret."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from configs.settings.base import SettingsError
from configs.settings.router import RouterLimits, RouterSettings
from configs.settings.scaling import ScalingSettings
from configs.settings.service import ModelSettings, ServiceSettings

M = TypeVar("M", bound=BaseModel)

_SECRETS = frozenset({"secret", "auth"})
"""Keys below which an error message must not quote the value."""


def parse_settings(args: dict[str, Any]) -> ServiceSettings:
    """Return the settings in a config file's `args`; raise SettingsError, a line per error."""
    return _parsed(ServiceSettings, args)


def parse_scaling(policy_kwargs: dict[str, Any]) -> ScalingSettings:
    """Return the settings in `policy_kwargs`; raise SettingsError, a line per error."""
    return _parsed(ScalingSettings, policy_kwargs)


def changed_limits(built: RouterLimits, user_config: Any) -> RouterLimits:
    """Return `built` with the values of `user_config`; `routing` is merged key by key.

    Raises SettingsError with one line per error, or if `user_config` is not a mapping.
    """
    if not isinstance(user_config, dict):
        raise SettingsError(f"user_config must be a mapping (got {user_config!r})")
    fixed = [key for key in user_config if key in RouterSettings.model_fields.keys() - RouterLimits.model_fields.keys()]
    if fixed:
        raise SettingsError(
            "\n".join(f"{key}: not a key of user_config; docs/configuration.md says how to change it" for key in fixed)
        )
    routing = user_config.get("routing")
    merged = built.model_dump() | user_config
    if isinstance(routing, dict):
        merged["routing"] = built.routing.model_dump() | routing
    return _parsed(RouterLimits, merged)


def _parsed(model: type[M], given: Any) -> M:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        found = [(".".join(map(str, one["loc"])), _advice(one, model)) for one in error.errors()]
        raise SettingsError("\n".join(f"{where}: {advice}" if where else advice for where, advice in found)) from None


def _advice(problem: Any, model: type[BaseModel]) -> str:
    if problem["type"] == "extra_forbidden":
        *path, key = problem["loc"]
        if path and key == "frontend":
            return "set `frontend` beside `prefill` and `decode`: both roles render the prompt"
        close = difflib.get_close_matches(str(key), _keys(model, path), n=1)
        return f"no such setting; did you mean {close[0]}?" if close else "no such setting"
    message = str(problem["msg"]).removeprefix("Value error, ")
    # A mapping or list may contain a secret, and a text in place of `transfer` may be one.
    hidden = (
        isinstance(problem["input"], Mapping | list | tuple | set)
        or not _SECRETS.isdisjoint(problem["loc"])
        or problem["loc"][-1:] == ("transfer",)
    )
    return message if hidden else f"{message} (got {problem['input']!r})"


def _keys(model: type[BaseModel], path: Sequence[object]) -> list[str]:
    """Return the keys of the settings model at `path` below `model`; empty if there is none."""
    for step in path:
        if isinstance(step, int):
            continue  # an index of a list
        field = model.model_fields.get(str(step))
        if field is not None and field.annotation == list[ModelSettings]:
            model = ModelSettings
            continue
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
