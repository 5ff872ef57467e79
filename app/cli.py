"""The command `tandem`. Without Ray and vLLM, the commands of NEED_NOTHING and `version` run."""

import argparse
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

from app.installation import environment

COMMANDS = {
    "run": ("app.run", "serve until Ctrl-C"),
    "doctor": ("app.doctor.__main__", "check this machine before it serves"),
    "config": ("app.show_config", "print a config file with every setting"),
    "upgrade": ("app.upgrade.__main__", "replace the pods of a service on Kubernetes without a gap"),
    "drain": ("app.drain", "empty one engine before its node is stopped"),
    "audit": ("app.audit", "compare answers of a running service's pairs with one engine's"),
    "version": ("", "print the releases of Tandem, Python and the main libraries"),
}
"""Module whose `main` runs each command, and its description."""

NEED_NOTHING = ("upgrade", "drain", "audit")

REQUIRED = {"ray": "pip install '.[serve]' in the checkout", "vllm": "install vLLM 0.32.0: docs/quickstart.md#packages"}
"""Module that most commands need, and how to install it."""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status; 1 if a library is not installed."""
    parser = argparse.ArgumentParser(prog="tandem", description="Prefill and decode on separate vLLM engines.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, description) in COMMANDS.items():
        commands.add_parser(name, help=description, add_help=False)
    chosen, rest = parser.parse_known_args(argv)
    if chosen.command == "version":
        print(f"tandem {version('tandem')}, {environment()}")
        return 0
    for module, remedy in REQUIRED.items():
        if chosen.command not in NEED_NOTHING and find_spec(module) is None:
            print(f"tandem {chosen.command}: the module {module} is not installed; {remedy}", file=sys.stderr)
            return 1
    status: int = import_module(COMMANDS[chosen.command][0]).main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
