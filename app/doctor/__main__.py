"""Run all checks: `tandem doctor [--config FILE] [--skip CHECK …]`.

The exit status is 0 if all checks that run pass, 1 if any fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

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
from configs.settings.service import ServiceSettings

Check = Callable[[dict[str, Any], ServiceSettings], Iterable[Finding]]
"""Function of the Serve config and of Tandem's settings in it; imports vLLM or Ray."""

CHECKS: dict[str, Check] = {
    "model": lambda _, settings: chain.from_iterable(
        chain(check_readable(one), check_template(one)) for one in settings.each_model().values()
    ),
    "kernels": lambda _, settings: chain.from_iterable(map(check_kernels, settings.each_model().values())),
    "libraries": lambda _, settings: check_libraries(settings),
    "gpus": lambda _, settings: check_gpus(settings),
    "engines": lambda _, settings: check_engines(settings),
    "shared-memory": lambda _, __: check_shared_memory(),
    "open-files": lambda _, settings: check_open_files(settings),
    "home": lambda _, __: check_home(),
    "temporary": lambda _, __: check_temporary_directory(),
    "ports": check_ports,
    "tls": check_tls,
    "ucx": lambda _, settings: check_ucx_devices(settings),
    "transfer": lambda _, settings: check_transfer(settings),
    "store": lambda _, settings: check_store(settings),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tandem doctor", description="Check a machine before it serves.")
    parser.add_argument("--config", type=config_file, default=EXAMPLE, help="a Serve config file")
    parser.add_argument(
        "--skip", nargs="*", choices=("python", "config", *CHECKS), default=[], help="checks to leave out"
    )
    options = parser.parse_args(argv)
    failed = 0
    for finding in examine(options.config, options.skip):
        print(finding, flush=True)
        failed += not finding.ok
    print(f"tandem: {f'{failed} checks failed' if failed else 'all checks that ran have passed'}")
    return 1 if failed else 0


def examine(path: Path, skip: Collection[str] = ()) -> Iterable[Finding]:
    """Yield the findings of all checks that are not in `skip`.

    If the configuration is invalid, the other checks use the default settings.
    """
    if "python" not in skip:
        yield from check_python()
    found, config, settings = check_config(path)
    if "config" not in skip:
        yield from found
    for name, check in CHECKS.items():
        if name not in skip:
            yield from check(config, settings)


if __name__ == "__main__":
    sys.exit(main())
