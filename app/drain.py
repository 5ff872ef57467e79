"""Empty one engine before its node or pod is stopped: `tandem drain ENGINE [--undo]`.

The engine refuses new requests. Decode moves its streams to other engines; prefill hands its queue
back. If the service has API keys, `TANDEM_OPERATOR_KEYS` must begin with one of its operator keys.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

from configs.settings.auth import environment_operator_keys

POLL_S = 1.0
REQUEST_S = 30.0
TRIES = 10
"""Consecutive polls without an answer after which the command ends."""


class DrainError(Exception):
    """The command failed; the message says why."""


def main(argv: list[str] | None = None) -> int:
    """Return 0 once the engine is empty, or accepts requests again, else 1."""
    parser = argparse.ArgumentParser(prog="tandem drain", description=" ".join((__doc__ or "").split()))
    parser.add_argument("engine", metavar="ENGINE", help="replica id on the status page, or its beginning")
    parser.add_argument("--undo", action="store_true", help="let the engine accept requests again")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the service (http://127.0.0.1:8000)")
    parser.add_argument("--timeout-s", type=float, default=600, help="longest wait (600); the engine stays drained")
    options = parser.parse_args(argv)
    try:
        if options.undo:
            state = send(options, "DELETE")
            print(f"{state['role']} {state['replica']} accepts requests again.")
        else:
            follow(options)
        return 0
    except (DrainError, KeyboardInterrupt) as error:
        print(f"tandem drain: {str(error) or 'interrupted; the engine stays drained until --undo'}", file=sys.stderr)
        return 1


def follow(options: argparse.Namespace) -> None:
    """Drain the engine and return when it is empty, or drained no longer; raise DrainError at the
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
            raise DrainError(f"{left} sequences run after {took_s:.0f} s; {name} stays drained: --undo")
        printed = left
        time.sleep(POLL_S)
        try:
            state, failed = send(options, "GET"), 0
        except DrainError as error:  # for example, an answer that was late
            failed += 1
            if failed == TRIES:
                raise DrainError(f"{error}; {name} stays drained") from None
        if not state["drained"]:
            raise DrainError(f"{name} accepts requests again: somebody has undone the drain")


def send(options: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the engine's state; raise DrainError with what the router reports."""
    request = urllib.request.Request(f"{options.url}/tandem/drain/{quote(options.engine, safe='')}", method=method)
    for key in environment_operator_keys()[:1]:
        request.add_header("Authorization", f"Bearer {key.get_secret_value()}")
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            state: dict[str, Any] = json.load(answer)
            return state
    except HTTPError as error:
        body = error.read().decode(errors="replace")
        try:
            raise DrainError(json.loads(body)["error"]["message"]) from None
        except (ValueError, KeyError, TypeError):
            raise DrainError(f"HTTP {error.code}: {body[:200]}") from None
    except (HTTPException, OSError, ValueError) as error:
        raise DrainError(f"{options.url}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
