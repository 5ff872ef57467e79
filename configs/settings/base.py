"""Base class, field types and error of all settings models; a string with a masked `repr`."""

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

RoleName = Literal["prefill", "decode"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SettingsError(ValueError):
    """A configuration is invalid, or cannot be read or checked; the message gives the cause."""


class Frozen(BaseModel):
    """Base of immutable models that refuse unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HiddenText(str):
    """Text with a masked `repr`, because vLLM logs its configuration."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'"
