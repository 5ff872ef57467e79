"""Base class, field types and parser of settings models. The service validates YAML with the same
models, and ``configs/reference.py`` generates the reference from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from connectors.errors import ConfigurationError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Positive


class Settings(BaseModel):
    """Base of immutable models that refuse unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


S = TypeVar("S", bound=Settings)


def parse(model: type[S], given: Mapping[str, Any], section: str = "", secret: frozenset[str] = frozenset()) -> S:
    """Parse a part of ``kv_connector_extra_config``, without conversions such as of "3" to 3.

    Raises ConfigurationError with one line per invalid or unknown key.

    ``section``  key of the part, with a dot at its end; empty for the whole
    ``secret``   keys whose values no message may quote
    """
    try:
        return model.model_validate(dict(given), strict=True)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_line(each, model, section, secret) for each in error.errors())) from None


def _line(problem: Any, model: type[Settings], section: str, secret: frozenset[str]) -> str:
    key = ".".join(map(str, problem["loc"]))
    where = f"kv_connector_extra_config: {section}{key}".rstrip(". ")
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key; known keys are {', '.join(sorted(model.model_fields))}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if not key or key in secret else f"{where}: {message} (got {problem['input']!r})"
