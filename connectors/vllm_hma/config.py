"""Parse and check ``kv_connector_extra_config``, the configuration of TandemConnector."""

from __future__ import annotations

import hmac
import ipaddress
import os
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from connectors.errors import ConfigurationError
from connectors.settings import parse
from connectors.store.settings import StoreSettings
from connectors.store.settings import parse_settings as parse_store
from connectors.vllm_hma.devices import has_rdma, interface_of, rdma_ports
from connectors.vllm_hma.handshake.secret import Keys, derive_keys
from connectors.vllm_hma.settings import MIN_SECRET_CHARACTERS, TransferOptions


def own_address() -> str | None:
    ray = sys.modules.get("ray")
    return str(ray.util.get_node_ip_address()) if ray is not None and ray.is_initialized() else None


class ConnectorConfig(TransferOptions):
    """Parsed ``kv_connector_extra_config``.

    ``side_channel_host``  default: loopback, which only peers on this machine reach; with a secret,
                           the node's address in a process of a Ray cluster (Ray Serve LLM)
    ``secret``             shared by all engines; empty: the engine accepts every peer that can
                           connect
    ``supervisor``         token that authorises a request to report ended engines
                           (``engines_lost``); empty: no report is accepted. Tandem's actors
                           generate it
    ``store``              settings of the KV store; None: no store
    """

    side_channel_host: str = "127.0.0.1"
    secret: str = Field("", repr=False)
    supervisor: str = Field("", repr=False)
    store: StoreSettings | None = None

    @property
    def keys(self) -> Keys:
        return derive_keys(self.secret)

    @property
    def reachable_host(self) -> str:
        return self.advertise_host or self.side_channel_host

    def believes(self, supervisor: str) -> bool:
        return bool(self.supervisor) and hmac.compare_digest(self.supervisor.encode(), supervisor.encode())

    @property
    def on_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.side_channel_host).is_loopback
        except ValueError:
            return self.side_channel_host == "localhost"

    @property
    def net_devices(self) -> tuple[str, ...]:
        """Network devices for UCX. Empty: UCX's environment variables or UCX itself choose.

        UCX could choose a transient interface, and hang when it disappears (docs/decisions/0006).
        """
        if self.devices or "UCX_NET_DEVICES" in os.environ:
            return tuple(self.devices)
        if self.on_loopback:
            return ("lo", *rdma_ports())
        interface = None if has_rdma() else interface_of(self.reachable_host)
        return (interface,) if interface is not None else ()

    @model_validator(mode="after")
    def _can_be_used(self) -> ConnectorConfig:
        if self.supervisor and len(self.supervisor) < MIN_SECRET_CHARACTERS:
            raise ValueError(f"supervisor must have at least {MIN_SECRET_CHARACTERS} characters")
        if self.reachable_host in ("0.0.0.0", "::", ""):
            raise ValueError(
                f"set advertise_host to an address at which peers can reach this host, not {self.reachable_host!r}"
            )
        return self


def parse_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Raises ConfigurationError that names the key."""
    given = {key: value for key, value in extra.items() if key != "store"}
    if given.get("secret") and "side_channel_host" not in given and (host := own_address()):
        given["side_channel_host"] = host
    config = parse(ConnectorConfig, given, secret=frozenset({"secret", "supervisor"}))
    derive_keys(config.secret)  # checks it
    return config.model_copy(update={"store": parse_store(extra)}) if "store" in extra else config


def with_port_of_rank(config: ConnectorConfig, data_parallel_rank: int) -> ConnectorConfig:
    if not config.side_channel_port:
        return config
    port = config.side_channel_port + data_parallel_rank
    if port >= 65536:
        raise ConfigurationError(
            f"kv_connector_extra_config: side_channel_port: data-parallel rank {data_parallel_rank} would listen on "
            f"port {port}; choose a lower port, or 0 for any free one"
        )
    return config.model_copy(update={"side_channel_port": port})
