"""Settings of the KV connector and of the KV store."""

import ipaddress
import os
from typing import Any, Literal

from pydantic import Field, SecretStr, model_validator

from configs.settings.base import Frozen, HiddenText, Seconds, SettingsError
from connectors.store.settings import StoreSettings

PEER_SECRET_VARIABLE = "TANDEM_PEER_SECRET"
MIN_SECRET_CHARACTERS = 16


def _is_of_one_node(host: str | None) -> bool:
    """Return whether `host` is an IP address of one node, not a name, unset or a wildcard."""
    try:
        return host is not None and not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class TransferSettings(Frozen):
    """Settings of the KV connector, named like the keys of its `kv_connector_extra_config`.

    `node_lost_s` is not such a key: decode actors use it (`actors/engine/node_failures.py`).
    """

    side_channel_host: str | None = Field(
        None, description="address on which an engine's side channel listens; unset: the address of the node"
    )
    side_channel_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of the side channel; 0: any free port. Data-parallel rank r listens on `side_channel_port` "
        "+ r",
    )
    advertise_host: str = Field(
        "",
        description="address at which peers reach the side channel; required if side_channel_host is `0.0.0.0` or "
        "`::`; empty: side_channel_host",
    )
    secret: SecretStr | None = Field(
        None,
        min_length=MIN_SECRET_CHARACTERS,
        description="secret of all engines that exchange KV, at least 16 characters; prefer the environment variable "
        f"`{PEER_SECRET_VARIABLE}`, because Ray Serve logs `args`. Without both: generated for the Ray cluster",
    )
    backends: list[str] = Field(["UCX"], min_length=1, description="NIXL backends")
    devices: list[str] = Field(
        [],
        description="network devices that UCX may use, by UCX's names (`mlx5_0:1`, `eth0`); empty: "
        "`UCX_NET_DEVICES`. Without both: loopback if side_channel_host is loopback; else all if the node has RDMA "
        "devices; else the interface with the side channel's address",
    )
    integrity: Literal["auto", "full", "off"] = Field(
        "auto",
        description="full: decode compares digests of all moved bytes before it runs the request; off: no digests "
        "(refused on GPUs before Hopper); auto: same as full",
    )
    streaming: Literal["auto", "chunk", "layer"] = Field(
        "auto",
        description="chunk: prefill sends KV after each chunk of the prompt; layer: the last chunk also layer by "
        "layer; auto: the cheaper one by measurement, or chunk on an accelerator. Always chunk with ubatching or KV "
        "of drafts",
    )
    trace_path: str = Field("", description="file to which each transfer event is appended as a JSON line; empty: none")
    handshake_s: Seconds = Field(30.0, description="timeout of a handshake, the first contact of two engines")
    progress_s: Seconds = Field(
        30.0,
        description="time without a message about a transfer after which decode cancels it; also without progress of "
        "a write, after which prefill's heartbeat for it stops. After twice this time prefill aborts it",
    )
    cancel_s: Seconds = Field(
        5.0,
        description="timeout for the answer to a cancellation; then decode quarantines the request's blocks and "
        "computes it in other blocks",
    )
    lease_s: Seconds = Field(60.0, description="time for which prefill holds finished blocks for an offer of decode")
    alive_s: Seconds = Field(
        5.0,
        description="interval of prefill's heartbeats for a transfer; at most half of progress_s",
    )
    step_s: Seconds = Field(
        300.0,
        description="time without a finished step after which a prefill engine with work stops its heartbeat; an "
        "engine whose core does not answer for 30 s more is replaced. No lower than "
        "`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` (300)",
    )
    fence_s: Seconds = Field(
        2.0,
        description="longest time for which a prefill engine's step waits for a write that reads blocks of a "
        "preempted request; then the transfer fails. With vLLM's V2 model runner the step does not wait",
    )
    forget_s: float = Field(
        3600.0,
        ge=1800.0,
        allow_inf_nan=False,
        description="silence after which prefill forgets a decode worker without an open transfer; decode forgets an "
        "unused prefill engine after half of it",
    )
    node_lost_s: Seconds | None = Field(
        None,
        description="grace period after Ray marks a node dead before its engines' writes are presumed stopped. "
        "Unset: 120 s more than Ray takes to end a cut-off node's actors: 300 s, or 840 s with KubeRay's fault "
        "tolerance. A value below Ray's time (180 s, 720 s) is refused",
    )

    @model_validator(mode="after")
    def _alive_is_heard(self) -> "TransferSettings":
        if self.alive_s * 2 > self.progress_s:
            raise ValueError("alive_s must be at most half of progress_s, or decode cancels transfers of busy engines")
        return self

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
