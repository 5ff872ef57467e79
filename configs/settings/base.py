"""Base class, field types and error of all settings models; a string with a masked `repr`."""

from typing import Any, Literal, get_args

from connectors.settings import Positive, Seconds, Settings

__all__ = ["ROLES", "Frozen", "HiddenText", "Positive", "RoleName", "Seconds", "SettingsError"]

RoleName = Literal["prefill", "decode"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)


class SettingsError(ValueError):
    """A configuration is invalid, or cannot be read or checked; the message gives the cause."""


class Frozen(Settings):
    """Base of the service's settings, which Serve pickles."""

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
