"""Test NIXL between two processes of this host: `python -m connectors.transport.selftest`.

The sender writes, then sends a message, as engines do; the parent process compares digests of both
memories. The output is one JSON object: `seconds`, the time of the write, and `bytes`; or `error`.
It also has `plugins`, the backends of this NIXL build, unless a process ended without an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from connectors.planning.layout import Region

# To import NIXL, which imports torch, and to start its agent.
START_S = 120.0
END_S = 10.0
ENDS = ("sender", "receiver")
TRANSFER_BYTES = 16 * 2**20
RUN_BYTES = 2**16
POLL_S = 0.0005


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m connectors.transport.selftest", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--backends", default="UCX", help="NIXL backends, separated by commas")
    parser.add_argument(
        "--devices", default="", help="network devices for UCX, separated by commas; empty: UCX_NET_DEVICES, else all"
    )
    parser.add_argument("--timeout-s", type=float, default=30.0, help="limit of the transfer itself, in seconds")
    parser.add_argument(
        "--gpu",
        nargs="*",
        choices=ENDS,
        default=[],
        help="ends with GPU memory: the sender's first GPU, the receiver's last",
    )
    parser.add_argument(
        "--show", action="store_true", help="show the processes' stderr, for example with UCX_PROTO_INFO=y"
    )
    parser.add_argument("--end", choices=ENDS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    backends, devices = options.backends.split(","), [one for one in options.devices.split(",") if one]
    if options.end:
        # NIXL writes to stdout, where the parent expects only this module's lines.
        pipe, sys.stdout = os.fdopen(os.dup(1), "w", buffering=1), sys.stderr
        os.dup2(2, 1)
        return _end(options.end, backends, devices, options.timeout_s, options.end in options.gpu, pipe)
    report = run(backends, devices, options.timeout_s, {"sender": {}, "receiver": {}}, options.show, options.gpu)
    print(json.dumps(report))
    return 1 if "error" in report else 0


def run(
    backends: list[str],
    devices: list[str],
    timeout_s: float,
    environments: dict[str, dict[str, str]],
    show: bool,
    on_gpu: Collection[str] = (),
) -> dict[str, Any]:
    """Run both child processes and return the JSON object of the module's docstring.

    It has `error` instead of an exception, also if a process ends or exceeds its limit.

    ``timeout_s``     limit of the transfer itself, in seconds
    ``environments``  environment variables that `sender` and `receiver` get in addition
    ``show``          whether the processes' stderr is shown
    """
    arguments = ["--backends", ",".join(backends), "--devices", ",".join(devices), "--timeout-s", str(timeout_s)]
    arguments += ["--gpu", *on_gpu]
    ends: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, own in environments.items():
            ends[name] = _start(name, arguments, own, show)
        receiver, sender = ends["receiver"], ends["sender"]
        ready = _answer("receiver", receiver, START_S)
        _tell(sender, ready)
        _answer("sender", sender, START_S)
        _tell(receiver, {})
        sent = _answer("sender", sender, timeout_s + 1)
        received = _answer("receiver", receiver, timeout_s)
        if received["digest"] != sent["digest"]:
            return {"error": "the received bytes differ from the bytes sent"}
        return {"seconds": sent["seconds"], "bytes": TRANSFER_BYTES, "plugins": ready["plugins"]}
    except _Failed as failed:
        return failed.report
    finally:
        for process in ends.values():
            process.kill()
            process.communicate()


class _Failed(Exception):
    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report)
        self.report = report


def _start(end: str, arguments: list[str], environment: dict[str, str], show: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--end", end, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None if show else subprocess.PIPE, bufsize=0,
        env=os.environ | environment,
    )  # fmt: skip


def _tell(process: subprocess.Popen[bytes], what: dict[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(what).encode() + b"\n")


def _answer(end: str, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    """Raises _Failed for an error, or if the process sends no line."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline() if ready else b""
    if line:
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _Failed(answer)
        return answer
    if not ready:
        raise _Failed({"error": f"the {end} sent no result within {timeout_s:g} s"})
    try:
        stderr = process.communicate(timeout=END_S)[1] or b""
    except subprocess.TimeoutExpired:
        raise _Failed({"error": f"the {end} closed its output, but did not end within {END_S:g} s"}) from None
    last = ["?", *stderr.decode(errors="replace").strip().splitlines()][-1]
    raise _Failed({"error": f"the {end} ended with status {process.returncode}: {last}"})


def _end(end: str, backends: list[str], devices: list[str], timeout_s: float, gpu: bool, pipe: IO[str]) -> int:
    from connectors.errors import TandemError

    try:
        (_send if end == "sender" else _receive)(backends, devices, timeout_s, gpu, pipe)
    except (TandemError, TimeoutError) as error:
        print(json.dumps({"error": f"the {end}: {error}", "plugins": _plugins()}), file=pipe)
        return 1
    return 0


def _receive(backends: list[str], devices: list[str], timeout_s: float, gpu: bool, pipe: IO[str]) -> None:
    import numpy as np

    from connectors.transport.nixl import NixlTransport

    region, digest = _memory(np.zeros(TRANSFER_BYTES, np.uint8), gpu, last=True)
    transport = NixlTransport("selftest-receiver/0", backends, devices)
    transport.register([region])
    ready = {"metadata": transport.metadata().hex(), "address": region.address, "plugins": _plugins()}
    ready |= {"memory": region.memory_kind.memory, "device": region.memory_kind.device}
    print(json.dumps(ready), file=pipe)
    sys.stdin.readline()  # the sender has started
    give_up_at = time.monotonic() + timeout_s
    while not transport.notifications():
        _rest(give_up_at, "the message after the write did not arrive in time")
    print(json.dumps({"digest": digest()}), file=pipe)
    sys.stdin.read()  # until the parent closes the pipe


def _send(backends: list[str], devices: list[str], timeout_s: float, gpu: bool, pipe: IO[str]) -> None:
    import numpy as np

    from connectors.planning.descriptors import Runs
    from connectors.planning.layout import MemoryKind
    from connectors.transport.nixl import NixlTransport

    region, digest = _memory(np.random.default_rng(0).integers(0, 256, TRANSFER_BYTES, np.uint8), gpu, last=False)
    transport = NixlTransport("selftest-sender/0", backends, devices)
    transport.register([region])
    receiver = json.loads(sys.stdin.readline())
    peer = transport.add_peer(bytes.fromhex(receiver["metadata"]))
    starts = np.arange(0, TRANSFER_BYTES, RUN_BYTES, dtype=np.int64)
    lengths = np.full(len(starts), RUN_BYTES, np.int64)
    print(json.dumps({}), file=pipe)
    began = time.monotonic()
    give_up_at = began + timeout_s
    runs = Runs(region.address + starts, receiver["address"] + starts, lengths)
    handle = transport.write(peer, runs, region.memory_kind, MemoryKind(receiver["memory"], receiver["device"]))
    while not transport.poll(handle):
        _rest(give_up_at, "the write did not finish in time")
    seconds = time.monotonic() - began
    transport.notify(peer, b"written")
    print(json.dumps({"digest": digest(), "seconds": seconds}), file=pipe)
    # NIXL makes progress only during calls, so keep calling it; the parent ends this process.
    while time.monotonic() < give_up_at:
        transport.notifications()
        time.sleep(POLL_S)


def _memory(content: np.ndarray[Any, np.dtype[np.uint8]], gpu: bool, last: bool) -> tuple[Region, Callable[[], str]]:
    """Return memory with `content`, and the function that computes its digest.

    ``last``  whether on the last GPU: sender and receiver have different ones if they can
    """
    from connectors.errors import ConfigurationError
    from connectors.planning.layout import MemoryKind, Region

    if not gpu:
        region = Region(content.ctypes.data, content.nbytes, MemoryKind("DRAM", 0))
        return region, lambda: hashlib.blake2b(content.data).hexdigest()
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise ConfigurationError("torch finds no CUDA GPU")
    device = count - 1 if last else 0
    # NIXL registers the memory in the context that is current.
    torch.cuda.set_device(device)
    memory = torch.from_numpy(content).to(f"cuda:{device}")
    torch.cuda.synchronize()
    region = Region(memory.data_ptr(), memory.nbytes, MemoryKind("VRAM", device))
    return region, lambda: hashlib.blake2b(memory.cpu().numpy().data).hexdigest()


def _rest(give_up_at: float, otherwise: str) -> None:
    if time.monotonic() > give_up_at:
        raise TimeoutError(otherwise)
    time.sleep(POLL_S)


def _plugins() -> list[str]:
    from nixl._api import nixl_agent, nixl_agent_config

    try:
        return sorted(nixl_agent("selftest-plugins", nixl_agent_config(backends=[])).get_plugin_list())
    except Exception:  # NIXL's errors cannot be imported by name; the list is optional
        return []


if __name__ == "__main__":
    sys.exit(main())
