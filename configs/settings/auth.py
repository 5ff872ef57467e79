"""API keys of clients, from a configuration and from environment variables."""

import os
from collections.abc import Sequence

from pydantic import Field, SecretStr, field_validator

from configs.settings.base import Frozen, SettingsError

API_KEYS_VARIABLE = "TANDEM_API_KEYS"
VLLM_API_KEY_VARIABLE = "VLLM_API_KEY"


class AuthSettings(Frozen):
    """Authentication of HTTP clients."""

    api_keys: tuple[SecretStr, ...] = Field(
        (),
        description="accepted keys (`Authorization: Bearer KEY`); prefer the environment variables "
        f"`{API_KEYS_VARIABLE}` (keys separated by commas) and `{VLLM_API_KEY_VARIABLE}` (one key). Without any key, "
        "requests need none. /, /health, /ping, /load, /metrics and /tandem/service never need one",
    )

    @field_validator("api_keys")
    @classmethod
    def _can_be_sent(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        return tuple(SecretStr(_sendable_key(key.get_secret_value())) for key in keys)

    def operators_keys(self) -> tuple[SecretStr, ...]:
        """Return the operator's API keys from these settings and this process's environment.

        Raises SettingsError if an environment variable has a key that no client can send, or is not
        empty but has no key.
        """
        return (*self.api_keys, *environment_keys())


def environment_keys() -> tuple[SecretStr, ...]:
    """Return the operator's API keys from this process's environment.

    Raises SettingsError if a variable has a key that no client can send, or is not empty but has no
    key.
    """
    listed = _keys_in(API_KEYS_VARIABLE, os.environ.get(API_KEYS_VARIABLE, "").split(","))
    single = _keys_in(VLLM_API_KEY_VARIABLE, [os.environ.get(VLLM_API_KEY_VARIABLE, "")])
    return tuple(map(SecretStr, (*listed, *single)))


def _keys_in(variable: str, values: Sequence[str]) -> list[str]:
    """Return the keys in the `values` of an environment variable, without surrounding blanks.

    Raises SettingsError if no client can send one of them, or if the variable is not empty but has
    no key.
    """
    try:
        found = [_sendable_key(key) for key in values if key.strip()]
    except ValueError as error:
        raise SettingsError(f"{variable}: {error}") from None
    if not found and list(values) != [""]:
        raise SettingsError(f"{variable}: is set, but contains no key; add a key, or unset the variable")
    return found


def _sendable_key(key: str) -> str:
    """Return `key` without surrounding blanks.

    Raises ValueError, without the key in its message, if the key is empty or no client can send it
    in a header.
    """
    key = key.strip()
    if not key:
        raise ValueError("a key must not be empty")
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(
            "a key must be printable ASCII without blanks, or no client can send it in a header; "
            "`openssl rand -hex 24` makes one"
        )
    return key
