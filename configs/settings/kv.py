"""Settings of the KV connector and of the KV store."""

import ipaddress
import os
from typing import Any

from pydantic import Field, SecretStr, model_validator

from configs.settings.base import Frozen, HiddenText, Seconds, SettingsError
from connectors.store.settings import StoreSettings
from connectors.vllm_hma.settings import MIN_SECRET_CHARACTERS, TransferOptions

PEER_SECRET_VARIABLE = "TANDEM_PEER_SECRET"


def _is_of_one_node(host: str | None) -> bool:
    """Return whether `host` is an IP address of one node, not a name, unset or a wildcard."""
    try:
        return host is not None and not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class TransferSettings(Frozen, TransferOptions):
    """Settings of the KV connector, named like the keys of its `kv_connector_extra_config`.

    `node_lost_s` is not such a key: decode actors use it (`actors/engine/node_failures.py`).
    """

    secret: SecretStr | None = Field(
        None,
        min_length=MIN_SECRET_CHARACTERS,
        description="secret of all engines that exchange KV, at least 16 characters; prefer the environment variable "
        f"`{PEER_SECRET_VARIABLE}`, because Ray Serve logs `args`. Without both: generated for the Ray cluster",
    )
    node_lost_s: Seconds | None = Field(
        None,
        description="grace period after Ray marks a node dead before its engines' writes are presumed stopped. "
        "Unset: 120 s more than Ray takes to end a cut-off node's actors: 300 s, or 840 s with KubeRay's fault "
        "tolerance. A value below Ray's time (180 s, 720 s) is refused",
    )

    @model_validator(mode="after")
    def _one_engine_to_a_port(self) -> "TransferSettings":
        # Without advertise_host, engines of both roles listen and are reached at this address, so
        # they are on one node.
        if self.side_channel_port and not self.advertise_host and _is_of_one_node(self.side_channel_host):
            raise ValueError(
                f"side_channel_port must be 0 with side_channel_host {self.side_channel_host}: the engines of both "
                f"roles would listen on {self.side_channel_host}:{self.side_channel_port}; for engines on several "
                "nodes, leave side_channel_host unset"
            )
        return self

    def connector_config(self, node_ip: str) -> dict[str, Any]:
        """Return the part of `kv_connector_extra_config` that these settings determine.

        ``node_ip``  address of the engine's node, the default of `side_channel_host`
        """
        return self.model_dump(exclude={"node_lost_s"}) | {
            "side_channel_host": self.side_channel_host or node_ip,
            "secret": HiddenText(self.secret.get_secret_value() if self.secret is not None else ""),
        }

    def operators_secret(self) -> SecretStr | None:
        """Return the operator's secret from these settings, else from this process's environment.

        None if both have none. Raises SettingsError if the secret is from the environment and too
        short.
        """
        if self.secret is not None:
            return self.secret
        found = os.environ.get(PEER_SECRET_VARIABLE)
        if not found:
            return None
        if len(found) < MIN_SECRET_CHARACTERS:
            raise SettingsError(f"{PEER_SECRET_VARIABLE}: must have at least {MIN_SECRET_CHARACTERS} characters")
        return SecretStr(found)


class KVStoreSettings(Frozen, StoreSettings):
    """Settings of the KV store, as the connector defines them."""

    def connector_config(self) -> dict[str, Any]:
        """Return the store's part of `kv_connector_extra_config`; empty if it is disabled."""
        return {"store": self.model_dump()} if self.enabled else {}
