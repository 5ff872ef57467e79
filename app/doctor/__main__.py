"""Run all checks: `tandem doctor [--config FILE] [--skip CHECK …]`.

The exit status is 0 if all checks that run pass, 1 if any fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

from app.doctor import Finding
from app.doctor.configuration import check_config, check_kernels, check_readable, check_template
from app.doctor.engines import check_engines
from app.doctor.machine import (
    check_gpus,
    check_home,
    check_libraries,
    check_open_files,
    check_ports,
    check_python,
    check_shared_memory,
    check_temporary_directory,
    check_tls,
    check_ucx_devices,
)
from app.doctor.store import check_store
from app.doctor.transfer import check_transfer
from app.installation import EXAMPLE, config_file

CHECKS = (
    *("python", "config", "model", "kernels", "libraries", "gpus", "engines", "shared-memory", "open-files"),
    *("home", "temporary", "ports", "tls", "ucx", "transfer", "store"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tandem doctor", description="Check a machine before it serves.")
    parser.add_argument("--config", type=config_file, default=EXAMPLE, help="a Serve config file")
    parser.add_argument("--skip", nargs="*", choices=CHECKS, default=[], help="checks to leave out")
    options = parser.parse_args(argv)
    failed = 0
    for finding in examine(options.config, options.skip):
        print(finding, flush=True)
        failed += not finding.ok
    print(f"tandem: {f'{failed} checks failed' if failed else 'all checks that ran have passed'}")
    return 1 if failed else 0


def examine(path: Path, skip: Iterable[str] = ()) -> Iterable[Finding]:
    """Yield the findings of all checks that are not in `skip`.

    If the configuration is invalid, the other checks use the default settings.
    """
    left_out = set(skip)
    if "python" not in left_out:
        yield from check_python()
    found, config, settings = check_config(path)
    if "config" not in left_out:
        yield from found
    models = list(settings.each_model().values())
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "model": lambda: chain.from_iterable(chain(check_readable(one), check_template(one)) for one in models),
        "kernels": lambda: chain.from_iterable(map(check_kernels, models)),
        "libraries": lambda: check_libraries(settings),
        "gpus": lambda: check_gpus(settings),
        "engines": lambda: check_engines(settings),
        "shared-memory": check_shared_memory,
        "open-files": lambda: check_open_files(settings),
        "home": check_home,
        "temporary": check_temporary_directory,
        "ports": lambda: check_ports(config, settings),
        "tls": lambda: check_tls(config, settings),
        "ucx": lambda: check_ucx_devices(settings),
        "transfer": lambda: check_transfer(settings),
        "store": lambda: check_store(settings),
    }
    for name, check in checks.items():
        if name not in left_out:
            yield from check()


if __name__ == "__main__":
    sys.exit(main())
