"""The connector's own configuration: what ``kv_connector_extra_config`` may hold, checked key by key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from connectors.errors import ConfigurationError
from connectors.protocol.limits import TransferLimits
from connectors.vllm_hma.streaming import Streaming


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Keys of ``kv_connector_extra_config``; those of ``TransferLimits`` stand beside them.

    ``side_channel_host``   interface on which engines hand out their cards; the default serves one machine only
    ``side_channel_port``   0 takes a free port; the prefill engine's answers carry the port taken
    ``advertise_host``      name or address under which peers reach side_channel_host; needed where that is 0.0.0.0
    ``backends``            NIXL back ends
    ``devices``             network devices that UCX may use and listen on; none given: all, or ``lo`` where
                            side_channel_host is a loopback address
    ``integrity``           full: digests of all bytes moved are compared before a request runs; off; auto: full where
                            the KV cache lies in host memory on both sides, off elsewhere
    ``streaming``           chunk: blocks leave when the chunk that completes them is computed; layer: those of a
                            prompt's last chunk layer by layer; auto: whichever of the two has cost less so far
    ``trace_path``          append one JSON line per transfer event to this file; for benchmarks
    """

    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 0
    advertise_host: str = ""
    backends: tuple[str, ...] = ("UCX",)
    devices: tuple[str, ...] = ()
    integrity: str = "auto"
    streaming: Streaming = Streaming.AUTO
    trace_path: str = ""
    limits: TransferLimits = field(default_factory=TransferLimits)

    @property
    def reachable_host(self) -> str:
        return self.advertise_host or self.side_channel_host

    @property
    def net_devices(self) -> tuple[str, ...]:
        """What UCX is told; none: its own environment counts, and without that it may use whatever there is.

        It would also use an interface that has come for a while, and go silent with it. Peers of an engine that shows
        its card on a loopback address live on this host.
        """
        local = self.side_channel_host.startswith("127.") or self.side_channel_host in ("localhost", "::1")
        return self.devices or (("lo",) if local and "UCX_NET_DEVICES" not in os.environ else ())


_CHOICES = {"integrity": ("auto", "full", "off"), "streaming": tuple(Streaming)}
_LIMITS = {f.name for f in fields(TransferLimits)}
_OWN: dict[str, type] = {
    "side_channel_host": str,
    "side_channel_port": int,
    "advertise_host": str,
    "backends": list,
    "devices": list,
    "integrity": str,
    "streaming": str,
    "trace_path": str,
}


def parse_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Raises ConfigurationError that names the key."""
    for key, value in extra.items():
        if key not in _OWN and key not in _LIMITS:
            known = ", ".join(sorted([*_OWN, *_LIMITS]))
            raise ConfigurationError(f"kv_connector_extra_config: unknown key {key!r}; known are {known}")
        if key in _OWN and (not isinstance(value, _OWN[key]) or isinstance(value, bool)):
            raise ConfigurationError(f"kv_connector_extra_config: {key} must be {_OWN[key].__name__}, not {value!r}")
    own: dict[str, Any] = {key: value for key, value in extra.items() if key in _OWN}
    if not 0 <= own.get("side_channel_port", 0) < 65536:
        raise ConfigurationError(f"kv_connector_extra_config: side_channel_port {own['side_channel_port']} is no port")
    for key, choices in _CHOICES.items():
        if key in own and own[key] not in choices:
            raise ConfigurationError(
                f"kv_connector_extra_config: {key} must be one of {', '.join(choices)}, not {own[key]!r}"
            )
    if "streaming" in own:
        own["streaming"] = Streaming(own["streaming"])
    for key in {"backends", "devices"} & own.keys():
        own[key] = tuple(str(name) for name in own[key])
    config = ConnectorConfig(**own, limits=TransferLimits(**{k: v for k, v in extra.items() if k in _LIMITS}))
    if config.reachable_host in ("0.0.0.0", "::", ""):
        raise ConfigurationError(
            f"kv_connector_extra_config: advertise_host must say how peers reach {config.side_channel_host!r}"
        )
    return config
