"""Check that NIXL's backends start and move bytes between two processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.doctor import Finding
from configs.settings.kv import TransferSettings
from configs.settings.service import ServiceSettings
from connectors.transport import selftest

TRANSFER_S = 30.0
"""Timeout in seconds of the test transfer, without the start of its processes."""


def check_transfer(settings: ServiceSettings) -> Iterator[Finding]:
    """Run a transfer between two child processes with the environments of prefill and decode.

    UCX may abort a process, so the doctor itself runs no transfer. Models whose engines have the
    same environments share a transfer. A second transfer is from and to GPUs, for the roles that
    have them.
    """
    tested: list[tuple[dict[str, dict[str, str]], list[str]]] = []
    for one in settings.each_model().values():
        roles = {"sender": one.prefill, "receiver": one.decode}
        environments = {end: dict(role.environment) for end, role in roles.items()}
        on_gpu = [end for end, role in roles.items() if role.num_gpus]
        for memory in [[], on_gpu] if on_gpu and _has_gpu() else [[]]:
            if (environments, memory) not in tested:
                tested.append((environments, memory))
                yield _transfer(
                    settings.transfer, environments, memory, f"{one.model_name}: " if settings.models else ""
                )


def _has_gpu() -> bool:
    """Return whether torch finds a GPU; the check `gpus` reports that it finds none."""
    import torch

    return torch.cuda.is_available()


def _transfer(
    transfer: TransferSettings, environments: dict[str, dict[str, str]], on_gpu: list[str], whose: str
) -> Finding:
    report: dict[str, Any] = selftest.run(
        transfer.backends, transfer.devices, TRANSFER_S, environments, show=False, on_gpu=on_gpu
    )
    plugins = report.get("plugins", [])
    missing = [one for one in transfer.backends if plugins and one not in plugins]
    if missing:
        remedy = f"set transfer.backends to some of {', '.join(plugins)}"
        return Finding("transfer", f"{whose}NIXL has no backend {', '.join(missing)}", remedy)
    if "error" not in report:
        megabytes, milliseconds = report["bytes"] / 2**20, report["seconds"] * 1e3
        where = f" (GPU memory: {' and '.join(on_gpu)})" if on_gpu else ""
        what = f"{megabytes:.0f} MiB between two processes{where} in {milliseconds:.0f} ms, first contact included"
        return Finding("transfer", whose + what)
    gpu = f" --gpu {' '.join(on_gpu)}" if on_gpu else ""
    remedy = (
        f"check the UCX_ variables; UCX_LOG_LEVEL=info python -m connectors.transport.selftest --show{gpu} prints the "
        "devices and transports that UCX selects"
    )
    if others := [one for one in transfer.backends if one != "UCX"]:
        remedy = f"install the libraries of {', '.join(others)}, or set transfer.backends to [UCX]"
    return Finding("transfer", whose + report["error"], remedy)
