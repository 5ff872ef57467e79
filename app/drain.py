"""Empty one engine before its node or pod is stopped: `tandem drain ENGINE [--undo]`.

The engine refuses new requests. Decode moves its streams to other engines; prefill hands its queue
back. If the service has API keys, `TANDEM_OPERATOR_KEYS` must begin with one of its operator keys.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any
from urllib.parse import quote

from app.service_client import URL, ServiceError, ask

POLL_S = 1.0
REQUEST_S = 30.0
TRIES = 10
"""Consecutive polls without an answer after which the command ends."""


def main(argv: list[str] | None = None) -> int:
    """Return 0 once the engine is empty, or accepts requests again, else 1."""
    parser = argparse.ArgumentParser(prog="tandem drain", description=" ".join((__doc__ or "").split()))
    parser.add_argument("engine", metavar="ENGINE", help="replica id on the status page, or its beginning")
    parser.add_argument("--undo", action="store_true", help="let the engine accept requests again")
    parser.add_argument("--url", default=URL, help=f"URL of the service ({URL})")
    parser.add_argument("--timeout-s", type=float, default=600, help="longest wait (600); the engine stays drained")
    options = parser.parse_args(argv)
    try:
        if options.undo:
            state = send(options, "DELETE")
            print(f"{state['role']} {state['replica']} accepts requests again.")
        else:
            follow(options)
        return 0
    except (ServiceError, KeyboardInterrupt) as error:
        print(f"tandem drain: {str(error) or 'interrupted; the engine stays drained until --undo'}", file=sys.stderr)
        return 1


def follow(options: argparse.Namespace) -> None:
    """Drain the engine and return when it is empty, or drained no longer; raise ServiceError at the
    limit.
    """
    began, printed, failed = time.monotonic(), None, 0
    state = send(options, "POST")
    while True:
        name, left, took_s = f"{state['role']} {state['replica']}", state["ongoing"], time.monotonic() - began
        if left != printed:
            print(f"  {took_s:.0f} s: {name} has {left} sequences left", flush=True)
        if not left:
            return print("Empty. The engine refuses requests until --undo or its end.", flush=True)
        if took_s >= options.timeout_s:
            raise ServiceError(f"{left} sequences run after {took_s:.0f} s; {name} stays drained: --undo")
        printed = left
        time.sleep(POLL_S)
        try:
            state, failed = send(options, "GET"), 0
        except ServiceError as error:  # for example, an answer that was late
            failed += 1
            if failed == TRIES:
                raise ServiceError(f"{error}; {name} stays drained") from None
        if not state["drained"]:
            raise ServiceError(f"{name} accepts requests again: somebody has undone the drain")


def send(options: argparse.Namespace, method: str) -> dict[str, Any]:
    state: dict[str, Any]
    state, _ = ask(f"{options.url}/tandem/drain/{quote(options.engine, safe='')}", REQUEST_S, method)
    return state


if __name__ == "__main__":
    sys.exit(main())
