"""Base class, field types and error of all settings models; a string with a masked `repr`."""

from typing import Annotated, Any, Literal, get_args

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

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Add the defaults of newer fields: a replica in a pod with a newer image receives the
        pickled settings of Serve's last build.
        """
        known, fields = state["__dict__"], type(self).model_fields.items()
        missing = {name: one for name, one in fields if name not in known and not one.is_required()}
        defaults = {name: one.get_default(call_default_factory=True) for name, one in missing.items()}
        super().__setstate__(state | {"__dict__": defaults | known})


class HiddenText(str):
    """Text with a masked `repr`, because vLLM logs its configuration."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'"
