"""The whole suite, in two processes: `make test`.

What only computes runs beside what starts engines, at a lower priority: engines take long to start, and most of that on
one core. Its output comes at the end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

COMPUTING = (
    "tests/benchmarks",
    "tests/configs",
    "tests/k8s",
    "tests/placement",
    "tests/planning",
    "tests/protocol",
    "tests/simulator",
    "tests/test_types.py",
)
"""Nothing in these waits for a clock or a process, so none of them minds being slow."""

PYTEST = (sys.executable, "-m", "pytest")


def main() -> int:
    """0 when both parts have passed. Interrupted or terminated, it waits for what they have started to be stopped."""
    missing = [path for path in COMPUTING if not Path(path).exists()]
    assert not missing, missing
    with tempfile.TemporaryFile() as output:
        # Two processes must not write the same cache.
        computing = subprocess.Popen(
            ["nice", "-n", "15", *PYTEST, "-p", "no:cacheprovider", *COMPUTING], stdout=output, stderr=subprocess.STDOUT
        )
        engines = subprocess.Popen([*PYTEST, *(f"--ignore={path}" for path in COMPUTING)])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to both of them, too
        signal.signal(signal.SIGTERM, lambda *_: _interrupt(engines, computing))
        codes = engines.wait(), computing.wait()
        output.seek(0)
        print(f"\nWhat only computes: {' '.join(COMPUTING)}\n{output.read().decode(errors='replace')}", flush=True)
    return max(map(abs, codes))


def _interrupt(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
