"""Keys from the shared secret."""

import pytest

from connectors.errors import ConfigurationError
from connectors.vllm_hma.handshake.secret import Keys, derive_keys

SECRET = "a secret of enough characters"


def test_one_secret_one_pair_of_keys() -> None:
    """Equal on every engine, different for two purposes; another secret has no key in common.

    Both sides of an upgrade derive the same keys: a change needs another protocol version.
    """
    keys, other = derive_keys(SECRET), derive_keys(SECRET + "!")
    assert {len(keys.messages), len(keys.identity)} == {32}
    assert len({keys.messages, keys.identity, other.messages, other.identity}) == 4
    assert keys.messages.hex()[:16] == "94d28a3dc286f5f7"
    assert derive_keys("") == Keys(b"", b"")
    assert repr(keys) == "Keys()", "no log line shows them"


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    """The message has the remedy, and not the secret."""
    with pytest.raises(ConfigurationError, match="at least 16 are required; create one with") as raised:
        derive_keys("hunter2")
    assert "hunter2" not in str(raised.value)
