"""API keys of clients, from a configuration and from environment variables."""

import os

from pydantic import Field, SecretStr, field_validator

from configs.settings.base import Frozen, SettingsError

API_KEYS_VARIABLE = "TANDEM_API_KEYS"
VLLM_API_KEY_VARIABLE = "VLLM_API_KEY"
OPERATOR_KEYS_VARIABLE = "TANDEM_OPERATOR_KEYS"


class AuthSettings(Frozen):
    """Authentication of HTTP clients."""

    api_keys: tuple[SecretStr, ...] = Field(
        (),
        description="accepted keys (`Authorization: Bearer KEY`); prefer the environment variables "
        f"`{API_KEYS_VARIABLE}` (keys separated by commas) and `{VLLM_API_KEY_VARIABLE}` (one key). Without any key, "
        "requests need none. /, /health, /ping, /load, /metrics and /tandem/service never need one",
    )

    operator_keys: tuple[SecretStr, ...] = Field(
        (),
        description=f"further keys, or the variable `{OPERATOR_KEYS_VARIABLE}`: with any key set, only these can read "
        "/tandem/status, drain engines and use `x-tandem-explain`",
    )

    @field_validator("api_keys", "operator_keys")
    @classmethod
    def _can_be_sent(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        return tuple(SecretStr(_sendable_key(key.get_secret_value())) for key in keys)

    def all_keys(self) -> tuple[SecretStr, ...]:
        """Return all keys, of these settings and of the environment. Raises as `_keys_in`."""
        return (*self.api_keys, *self.operator_keys, *environment_keys(), *environment_operator_keys())


def environment_keys() -> tuple[SecretStr, ...]:
    """Return the environment's keys other than operator keys. Raises as `_keys_in`."""
    return (*_keys_in(API_KEYS_VARIABLE), *_keys_in(VLLM_API_KEY_VARIABLE, single=True))


def environment_operator_keys() -> tuple[SecretStr, ...]:
    """Return the environment's operator keys. Raises as `_keys_in`."""
    return _keys_in(OPERATOR_KEYS_VARIABLE)


def _keys_in(variable: str, single: bool = False) -> tuple[SecretStr, ...]:
    """Return the keys in an environment variable, without surrounding blanks.

    Raises SettingsError if no client can send one of them, or if the variable is not empty but has
    no key.
    """
    given = os.environ.get(variable, "")
    try:
        found = [_sendable_key(key) for key in ([given] if single else given.split(",")) if key.strip()]
    except ValueError as error:
        raise SettingsError(f"{variable}: {error}") from None
    if given and not found:
        raise SettingsError(f"{variable}: is set, but contains no key; add a key, or unset the variable")
    return tuple(map(SecretStr, found))


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
