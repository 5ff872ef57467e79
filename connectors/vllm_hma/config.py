"""Parse and check ``kv_connector_extra_config``, the configuration of TandemConnector."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from connectors.errors import ConfigurationError
from connectors.protocol.limits import MIN_FORGET_S, TransferLimits
from connectors.store.settings import StoreSettings
from connectors.store.settings import parse_settings as parse_store
from connectors.vllm_hma.devices import has_rdma, interface_of, rdma_ports
from connectors.vllm_hma.handshake.secret import MIN_SECRET_CHARACTERS, Keys, derive_keys
from connectors.vllm_hma.streaming import Streaming


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Parsed ``kv_connector_extra_config``.

    ``side_channel_host``  address or host name on which the side channel listens; with the default,
                           only peers on this machine reach it
    ``side_channel_port``  port of the side channel; data-parallel rank r listens on this port + r.
                           0: each rank takes a free port
    ``advertise_host``     host name or address at which peers reach the side channel; empty:
                           side_channel_host. Required if side_channel_host is 0.0.0.0, :: or empty
    ``backends``           NIXL backends
    ``devices``            network devices for UCX; if empty, ``net_devices`` chooses
    ``integrity``          of a decode engine. full: compare digests of all received bytes before a
                           request runs; off: compare none (``accelerator.check_integrity``); auto:
                           same as full. A prefill engine computes the digests that decode requests,
                           whatever its own value
    ``streaming``          of a prefill engine. chunk: write blocks when their chunk is computed;
                           layer: also write a prompt's last chunk layer by layer; auto: the mode
                           with the lower measured cost, and chunk on an accelerator. With ubatching
                           or with KV of drafts in the cache, it is always chunk
    ``store``              settings of the KV store; None: no store
    ``trace_path``         file for one JSON line per transfer event, for benchmarks; empty: no
                           trace
    ``supervisor``         token that authorises a request to report ended engines
                           (``engines_lost``); empty: no report is accepted. Tandem's actors
                           generate it
    ``limits``             deadlines; each is a key of its own in the configuration
    ``keys``               keys derived from ``secret``, which all engines share; with an empty
                           secret, the engine accepts every peer that can connect
    """

    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 0
    advertise_host: str = ""
    backends: tuple[str, ...] = ("UCX",)
    devices: tuple[str, ...] = ()
    integrity: str = "auto"
    streaming: Streaming = Streaming.AUTO
    trace_path: str = ""
    store: StoreSettings | None = None
    supervisor: str = field(default="", repr=False)
    limits: TransferLimits = field(default_factory=TransferLimits)
    keys: Keys = field(default_factory=Keys)

    @property
    def reachable_host(self) -> str:
        """Host name or address of the side channel for peers."""
        return self.advertise_host or self.side_channel_host

    def believes(self, supervisor: str) -> bool:
        """Return whether ``supervisor`` is this engine's supervisor token; False if it has none."""
        return bool(self.supervisor) and hmac.compare_digest(self.supervisor.encode(), supervisor.encode())

    @property
    def net_devices(self) -> tuple[str, ...]:
        """Network devices for UCX. Empty: UCX's environment variables or UCX itself choose.

        ``devices`` takes precedence, then the environment variable UCX_NET_DEVICES. An engine with
        its side channel on a loopback address has peers on this host only and uses ``lo`` and RDMA.
        On a host with RDMA devices, UCX chooses. On other hosts, the result is the interface with
        the address ``reachable_host``, if there is one. UCX itself could choose a transient
        interface, and hang when that interface disappears (docs/decisions/0006).
        """
        if self.devices or "UCX_NET_DEVICES" in os.environ:
            return self.devices
        if self.side_channel_host.startswith("127.") or self.side_channel_host in ("localhost", "::1"):
            return ("lo", *rdma_ports())
        interface = None if has_rdma() else interface_of(self.reachable_host)
        return (interface,) if interface is not None else ()


_CHOICES = {"integrity": ("auto", "full", "off"), "streaming": tuple(Streaming)}
_LIMITS = {f.name for f in fields(TransferLimits)}
_OWN: dict[str, type] = {
    "side_channel_host": str,
    "side_channel_port": int,
    "advertise_host": str,
    "secret": str,
    "supervisor": str,
    "backends": list,
    "devices": list,
    "integrity": str,
    "streaming": str,
    "trace_path": str,
    "store": dict,
}


def parse_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Parse ``kv_connector_extra_config``.

    Raises ConfigurationError that names the key, for an invalid value or an unknown key.
    """
    for key, value in extra.items():
        if key not in _OWN and key not in _LIMITS:
            known = ", ".join(sorted([*_OWN, *_LIMITS]))
            raise ConfigurationError(f"kv_connector_extra_config: unknown key {key!r}; known keys are {known}")
        if key in _OWN and (not isinstance(value, _OWN[key]) or isinstance(value, bool)):
            shown = "" if key in ("secret", "supervisor") else f", not {value!r}"
            raise ConfigurationError(f"kv_connector_extra_config: {key} must be of type {_OWN[key].__name__}{shown}")
    own: dict[str, Any] = {key: value for key, value in extra.items() if key in _OWN}
    if not 0 <= own.get("side_channel_port", 0) < 65536:
        raise ConfigurationError("kv_connector_extra_config: side_channel_port must be 0 to 65535")
    for key, choices in _CHOICES.items():
        if key in own and own[key] not in choices:
            raise ConfigurationError(
                f"kv_connector_extra_config: {key} must be one of {', '.join(choices)}, not {own[key]!r}"
            )
    if "store" in own:
        own["store"] = parse_store(extra)
    if "streaming" in own:
        own["streaming"] = Streaming(own["streaming"])
    if own.get("supervisor") and len(own["supervisor"]) < MIN_SECRET_CHARACTERS:
        raise ConfigurationError(
            f"kv_connector_extra_config: supervisor must have at least {MIN_SECRET_CHARACTERS} characters"
        )
    for key in {"backends", "devices"} & own.keys():
        own[key] = tuple(str(name) for name in own[key])
    keys = derive_keys(own.pop("secret", ""))
    limits = TransferLimits(**{k: v for k, v in extra.items() if k in _LIMITS})
    if limits.forget_s < MIN_FORGET_S:
        raise ConfigurationError(f"kv_connector_extra_config: forget_s must be at least {MIN_FORGET_S:g} s")
    config = ConnectorConfig(**own, limits=limits, keys=keys)
    if config.reachable_host in ("0.0.0.0", "::", ""):
        raise ConfigurationError(
            f"kv_connector_extra_config: set advertise_host to an address at which peers can reach this host, "
            f"not {config.reachable_host!r}"
        )
    return config


def with_port_of_rank(config: ConnectorConfig, data_parallel_rank: int) -> ConnectorConfig:
    """Return ``config`` with the side channel port of a data-parallel rank of the engine.

    Port 0, which selects a free port, stays 0. Raises ConfigurationError if the rank's port would
    exceed 65535.
    """
    if not config.side_channel_port:
        return config
    port = config.side_channel_port + data_parallel_rank
    if port >= 65536:
        raise ConfigurationError(
            f"kv_connector_extra_config: side_channel_port: data-parallel rank {data_parallel_rank} would listen on "
            f"port {port}; choose a lower port, or 0 for any free one"
        )
    return replace(config, side_channel_port=port)
