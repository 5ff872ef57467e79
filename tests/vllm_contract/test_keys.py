"""Keys from the shared secret."""

import pytest

from connectors.errors import ConfigurationError
from connectors.vllm_hma.handshake.secret import Keys, derive_keys

SECRET = "a secret of enough characters"


def test_one_secret_one_pair_of_keys() -> None:
    """Equal on every engine, different for two purposes; another secret has no key in common."""
    keys = derive_keys(SECRET)
    assert keys == derive_keys(str(SECRET))
    assert {len(keys.messages), len(keys.identity)} == {32}
    other = derive_keys(SECRET + "!")
    assert len({keys.messages, keys.identity, other.messages, other.identity}) == 4


def test_known_keys() -> None:
    """Both sides of an upgrade derive the same keys: a change here needs another protocol
    version.
    """
    assert derive_keys(SECRET).messages.hex()[:16] == "94d28a3dc286f5f7"


def test_no_secret_no_keys() -> None:
    """Engines without a secret trust every peer that can connect."""
    assert derive_keys("") == Keys(b"", b"")


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    """The message has the remedy, and not the secret."""
    with pytest.raises(ConfigurationError, match="at least 16 are required; create one with") as raised:
        derive_keys("hunter2")
    assert "hunter2" not in str(raised.value)


def test_keys_are_not_shown() -> None:
    """The secret appears in no log line and no stack trace with locals."""
    keys = derive_keys(SECRET)
    assert repr(keys) == "Keys()"
