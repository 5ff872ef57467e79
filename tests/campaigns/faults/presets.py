"""Connectors that the campaign knows by name, and the limits of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

    transfer: Mapping[str, Any]
    bound_s: float
    lease_s: float
    held_s: float
    together: bool = False
    traces: bool = False
    side_channel: str = ""
    side_channel_variable: str = ""

    def server_arguments(self, role: str, port: int, trace: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Return ``--kv-transfer-config`` and environment of a server; ``port``: side channel."""
        extra = dict(self.transfer.get("kv_connector_extra_config", {}))
        environment = {}
        if self.side_channel:
            extra[self.side_channel] = port
        if self.side_channel_variable:
            environment[self.side_channel_variable] = str(port)
        if self.traces:
            extra["trace_path"] = str(trace)
        config = dict(self.transfer) | {"kv_role": f"kv_{role}", "kv_connector_extra_config": extra}
        return config, environment


_TANDEM = {"handshake_s": 4.0, "progress_s": 4.0, "cancel_s": 1.0, "lease_s": 5.0, "alive_s": 1.0, "fence_s": 2.0}
_NIXL_LEASE_S = 8


def _nixl(connector: str, **extra: Any) -> Connector:
    """Return a connector of vLLM with a lease of 8 s (default 30), the rest as in its guide."""
    own = {"kv_lease_duration": _NIXL_LEASE_S, **extra}
    return Connector(
        {"kv_connector": connector, "kv_load_failure_policy": "fail", "kv_connector_extra_config": own},
        bound_s=_NIXL_LEASE_S + COMPUTING_S,
        lease_s=_NIXL_LEASE_S,
        held_s=_NIXL_LEASE_S + 5.0,
        side_channel_variable="VLLM_NIXL_SIDE_CHANNEL_PORT",
    )


PRESETS = {
    "tandem": Connector(
        {
            "kv_connector": "TandemConnector",
            "kv_connector_module_path": "connectors.vllm_hma.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(_TANDEM),
        },
        # Handshake (or silence, which is as long), the unanswered Cancel, two probes of an ended
        # process; then the prompt is computed.
        bound_s=_TANDEM["handshake_s"] + 2 * _TANDEM["cancel_s"] + 6.0 + COMPUTING_S,
        lease_s=_TANDEM["lease_s"],
        held_s=_TANDEM["lease_s"] + _TANDEM["progress_s"] + 4.0,
        together=True,
        traces=True,
        side_channel="side_channel_port",
    ),
    "nixl": _nixl("NixlConnector"),
    "nixl-push": _nixl("NixlPushConnector", push_registration_timeout=_NIXL_LEASE_S),
}
