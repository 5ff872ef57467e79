"""Check that NIXL's backends start and move bytes between two processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.doctor.finding import Finding
from configs.settings.kv import TransferSettings
from configs.settings.service import ServiceSettings
from connectors.transport import selftest

TRANSFER_S = 30.0
"""Timeout in seconds of the test transfer, without the start of its processes."""


def check_transfer(settings: ServiceSettings) -> Iterator[Finding]:
    """Run a transfer between two child processes with the environments of prefill and decode.

    UCX may abort a process, so the doctor itself runs no transfer. Models whose engines have the
    same environments share a transfer.
    """
    tested: list[tuple[Mapping[str, str], Mapping[str, str]]] = []
    for one in settings.each_model().values():
        environments = (one.prefill.environment, one.decode.environment)
        if environments not in tested:
            tested.append(environments)
            yield _transfer(settings.transfer, *environments, f"{one.model_name}: " if settings.models else "")


def _transfer(
    transfer: TransferSettings, sender: Mapping[str, str], receiver: Mapping[str, str], whose: str
) -> Finding:
    environments = {"sender": dict(sender), "receiver": dict(receiver)}
    report: dict[str, Any] = selftest.run(transfer.backends, transfer.devices, TRANSFER_S, environments, show=False)
    plugins = report.get("plugins", [])
    missing = [one for one in transfer.backends if plugins and one not in plugins]
    if missing:
        remedy = f"set transfer.backends to some of {', '.join(plugins)}"
        return Finding("transfer", f"{whose}NIXL has no backend {', '.join(missing)}", remedy)
    if "error" not in report:
        megabytes, milliseconds = report["bytes"] / 2**20, report["seconds"] * 1e3
        what = f"{megabytes:.0f} MiB between two processes in {milliseconds:.0f} ms, first contact included"
        return Finding("transfer", whose + what)
    remedy = (
        "check the UCX_ variables; UCX_LOG_LEVEL=info python -m connectors.transport.selftest --show prints the "
        "devices and transports that UCX selects"
    )
    if others := [one for one in transfer.backends if one != "UCX"]:
        remedy = f"install the libraries of {', '.join(others)}, or set transfer.backends to [UCX]"
    return Finding("transfer", whose + report["error"], remedy)
