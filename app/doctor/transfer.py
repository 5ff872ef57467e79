"""Checks that NIXL's backends start and move bytes between two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from app.doctor.finding import Finding
from configs.settings.service import ServiceSettings

LONGEST_S = 300.0


def check_transfer(settings: ServiceSettings) -> Iterator[Finding]:
    """Run a transfer between two child processes with the environments of prefill and decode.

    UCX may abort a process, so the doctor itself runs no transfer.
    """
    backends = settings.transfer.backends
    command = [
        sys.executable, "-m", "connectors.transport.selftest", "--backends", ",".join(backends),
        "--devices", ",".join(settings.transfer.devices),
        "--sender-env", json.dumps(settings.prefill.environment),
        "--receiver-env", json.dumps(settings.decode.environment),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    lines = ended.stdout.splitlines()
    if not lines:
        last_line = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        what = f"the transfer test ended with status {ended.returncode}: {last_line}"
        yield Finding("transfer", what, "run the test and show its log: python -m connectors.transport.selftest --show")
        return
    report = json.loads(lines[-1])
    plugins = report.get("plugins", [])
    missing = [one for one in backends if plugins and one not in plugins]
    if missing:
        remedy = f"set transfer.backends to some of {', '.join(plugins)}"
        yield Finding("transfer", f"NIXL has no backend {', '.join(missing)}", remedy)
        return
    if "error" not in report:
        megabytes, milliseconds = report["bytes"] / 2**20, report["seconds"] * 1e3
        what = f"{megabytes:.0f} MiB between two processes in {milliseconds:.0f} ms, first contact included"
        yield Finding("transfer", what)
        return
    remedy = "check the UCX_ variables; UCX_LOG_LEVEL=info logs the devices and transports that UCX selects"
    if others := [one for one in backends if one != "UCX"]:
        remedy = f"install the libraries of {', '.join(others)}, or set transfer.backends to [UCX]"
    yield Finding("transfer", report["error"], remedy)
