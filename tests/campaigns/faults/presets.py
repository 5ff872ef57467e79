"""Connectors that the campaign knows by name, and the limits of each.

Any other vLLM connector with the public protocol (``do_remote_decode``, its answer's
``kv_transfer_params`` passed on to decode) can be named by its KVTransferConfig as JSON;
``GENERIC`` has its limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROUTER_PREFILL_S = 12.0
"""Time after which the driver, as router, cancels a prefill leg."""

COMPUTING_S = 15.0
"""Time for a prompt among others, on a machine that several pairs of engines share."""


@dataclass(frozen=True)
class Connector:
    """A connector and its limits.

    ``bound_s`` is the time from a decode leg's start to its end, whatever dies: the connector's
    deadlines and time to compute. ``lease_s`` is the time for which a producer keeps unfetched
    blocks. ``held_s`` is the time for which any block may be held after the last request has ended
    and dead engines have been replaced. ``side_channel`` is the key of kv_connector_extra_config
    for a port, ``side_channel_variable`` the environment variable.
    """

    name: str
    transfer: Mapping[str, Any]
    bound_s: float
    lease_s: float
    held_s: float
    settings: str
    together: bool = False
    traces: bool = False
    side_channel: str = ""
    side_channel_variable: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def server_arguments(
        self, role: str, port: int, trace: Path, host: str = ""
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return ``--kv-transfer-config`` and environment of a server in ``role`` with side channel
        ``port``.

        ``host`` is the server's address on a link between the two; without one both use the
        loopback.
        """
        extra = dict(self.transfer.get("kv_connector_extra_config", {}))
        environment = dict(self.environment)
        if self.side_channel:
            extra[self.side_channel] = port
        if self.side_channel_variable:
            environment[self.side_channel_variable] = str(port)
        if self.traces:
            extra["trace_path"] = str(trace)
        if host:
            extra["side_channel_host"] = host
            # Shared memory would bypass the link. An engine's own ranks use the loopback.
            environment |= {"UCX_TLS": "tcp,self", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        config = dict(self.transfer) | {"kv_role": f"kv_{role}", "kv_connector_extra_config": extra}
        return config, environment


# Handshake (or silence, which is as long), the unanswered Cancel, two probes of an ended process;
# then the prompt is computed.
_TANDEM = {
    "handshake_s": 4.0,
    "progress_s": 4.0,
    "cancel_s": 1.0,
    "lease_s": 5.0,
    "alive_s": 1.0,
    "fence_s": 2.0,
}
_LOOKS_S = 6.0
_TANDEM_BOUND_S = _TANDEM["handshake_s"] + 2 * _TANDEM["cancel_s"] + _LOOKS_S + COMPUTING_S
_NIXL_LEASE_S = 8
_NIXL_SETTINGS = (
    f"kv_load_failure_policy fail, as in its usage guide; kv_lease_duration {_NIXL_LEASE_S} s (default "
    "30), hence a heartbeat every second, so that leases end within the campaign; its workers' core pinning "
    "undone; everything else at its default"
)


def _nixl(name: str, connector: str, policy: str = "fail", **extra: Any) -> Connector:
    settings = _NIXL_SETTINGS.replace("policy fail, as in its usage guide", f"policy {policy}")
    return Connector(
        name,
        {
            "kv_connector": connector,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"kv_lease_duration": _NIXL_LEASE_S, **extra},
        },
        bound_s=_NIXL_LEASE_S + COMPUTING_S,
        lease_s=_NIXL_LEASE_S,
        held_s=_NIXL_LEASE_S + 5.0,
        settings=_NIXL_SETTINGS if policy == "fail" else settings,
        side_channel_variable="VLLM_NIXL_SIDE_CHANNEL_PORT",
    )


PRESETS = {
    "tandem": Connector(
        "tandem",
        {
            "kv_connector": "TandemConnector",
            "kv_connector_module_path": "connectors.vllm_hma.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(_TANDEM),
        },
        bound_s=_TANDEM_BOUND_S,
        lease_s=_TANDEM["lease_s"],
        held_s=_TANDEM["lease_s"] + _TANDEM["progress_s"] + 4.0,
        settings="kv_load_failure_policy recompute; " + ", ".join(f"{key} {value:g}" for key, value in _TANDEM.items()),
        together=True,
        traces=True,
        side_channel="side_channel_port",
    ),
    "nixl": _nixl("nixl", "NixlConnector"),
    "nixl-recompute": _nixl("nixl-recompute", "NixlConnector", "recompute"),
    "nixl-push": replace(
        _nixl("nixl-push", "NixlPushConnector", push_registration_timeout=_NIXL_LEASE_S),
        settings=_NIXL_SETTINGS + f"; push_registration_timeout {_NIXL_LEASE_S} s (default 480)",
    ),
}
GENERIC: dict[str, Any] = {"bound_s": 60.0, "lease_s": 30.0, "held_s": 60.0}


def connector(text: str) -> Connector:
    """Return a preset by name, or a KVTransferConfig from JSON. Raises ValueError."""
    if text in PRESETS:
        return PRESETS[text]
    if not text.lstrip().startswith("{"):
        known = ", ".join(PRESETS)
        raise ValueError(f"CONNECTOR {text!r} is neither a preset ({known}) nor a KVTransferConfig as JSON")
    try:
        transfer = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"CONNECTOR is neither a preset nor JSON: {error}") from None
    if not isinstance(transfer.get("kv_connector"), str):
        raise ValueError("CONNECTOR: the KVTransferConfig must name a kv_connector")
    transfer.pop("kv_role", None)
    return Connector(transfer["kv_connector"], transfer, settings=json.dumps(transfer), **GENERIC)
