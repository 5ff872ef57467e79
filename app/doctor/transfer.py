"""Checks that NIXL's back ends start and move bytes between two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from app.doctor.finding import Finding
from configs.settings import ServiceSettings

LONGEST_S = 300.0


def check_transfer(settings: ServiceSettings) -> Iterator[Finding]:
    """Transfer between two processes with each role's environment, outside this one: UCX may end a
    process."""
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
        complaint = (ended.stderr.strip().splitlines() or ["no word"])[-1]
        yield Finding("transfer", f"the test ended with status {ended.returncode}: {complaint}", "see above")
        return
    report = json.loads(lines[-1])
    plugins = report.get("plugins", [])
    missing = [one for one in backends if plugins and one not in plugins]
    if missing:  # NIXL itself only warns about another release
        remedy = f"set transfer.backends to some of {', '.join(plugins)}"
        yield Finding("transfer", f"NIXL has no back end {', '.join(missing)}", remedy)
        return
    if "error" not in report:
        megabytes, milliseconds = report["bytes"] / 2**20, report["seconds"] * 1e3
        what = f"{megabytes:.0f} MiB between two processes in {milliseconds:.0f} ms, first contact included"
        yield Finding("transfer", what)
        return
    remedy = "look at the UCX_ variables; UCX_LOG_LEVEL=info says which devices and transports it takes"
    if others := [one for one in backends if one != "UCX"]:
        remedy = f"see whether what {', '.join(others)} needs is installed, or set transfer.backends to [UCX]"
    yield Finding("transfer", report["error"], remedy)
