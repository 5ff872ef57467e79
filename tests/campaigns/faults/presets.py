"""The connectors that the campaign knows by name, and what it may expect of each.

Any other vLLM connector that speaks the public protocol (``do_remote_decode``, its answer's ``kv_transfer_params``
handed on to decode) can be named by its KVTransferConfig as JSON; it is then held to ``GENERIC``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROUTER_PREFILL_S = 12.0
"""The driver plays a router that gives up a prefill leg after this time."""

COMPUTING_S = 15.0
"""For a prompt among others, on a machine that several pairs of engines share."""


@dataclass(frozen=True)
class Connector:
    """``bound_s`` from a decode leg's start to its end, whatever dies: the connector's deadlines and time to compute.

    ``lease_s`` is how long a producer keeps blocks that nobody fetches, ``held_s`` how long any block may be held after
    the last request has ended and the dead have been replaced. ``side_channel`` names the key of
    kv_connector_extra_config that takes a port, ``side_channel_variable`` the environment variable that does.
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

    def server_arguments(self, role: str, port: int, trace: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """``--kv-transfer-config`` and environment of a server in ``role``, whose side channel takes ``port``."""
        extra = dict(self.transfer.get("kv_connector_extra_config", {}))
        environment = dict(self.environment)
        if self.side_channel:
            extra[self.side_channel] = port
        if self.side_channel_variable:
            environment[self.side_channel_variable] = str(port)
        if self.traces:
            extra["trace_path"] = str(trace)
        config = dict(self.transfer) | {"kv_role": f"kv_{role}", "kv_connector_extra_config": extra}
        return config, environment


# Handshake (or silence, which is as long), the Cancel that is not answered, two looks at a process that is gone; then
# the prompt is computed.
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
    """A preset's name, or a KVTransferConfig as JSON. Raises ValueError that says what is wrong."""
    if text in PRESETS:
        return PRESETS[text]
    if not text.lstrip().startswith("{"):
        known = ", ".join(PRESETS)
        raise ValueError(f"CONNECTOR {text!r} is neither a preset ({known}) nor a KVTransferConfig as JSON")
    try:
        transfer = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"CONNECTOR is no JSON: {error}") from None
    if not isinstance(transfer.get("kv_connector"), str):
        raise ValueError("CONNECTOR: the KVTransferConfig must name a kv_connector")
    transfer.pop("kv_role", None)
    return Connector(transfer["kv_connector"], transfer, settings=json.dumps(transfer), **GENERIC)
