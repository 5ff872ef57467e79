"""Base of all settings models: frozen, without unknown keys."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

RoleName = Literal["prefill", "decode"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SettingsError(ValueError):
    """An invalid configuration; the message names each invalid key."""


class Frozen(BaseModel):
    """Base of immutable models without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HiddenText(str):
    """Text with a masked `repr`, because vLLM logs its configuration."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'"
