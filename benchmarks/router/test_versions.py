"""The edited copy of this checkout is a later release of the RPC protocol."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.rpc.messages import FrameReader, RpcHello, RpcProtocolError, RpcWelcome, encode
from benchmarks.router.versions import EDITED_VERSION, Release, later_release

SPEAK = """
import sys
from actors.rpc.protocol import EngineProtocol
engine = EngineProtocol("key")
list(engine.receive(bytes.fromhex(sys.argv[1])))
welcome = engine.take()
engine.reply(1, 42)
print(welcome.hex(), engine.take().hex())
"""


def spoken(tree: Path, offered: int) -> list[bytes]:
    """Return the frames with which the release's engine answers a router, and replies to it."""
    hello = encode([RpcHello(offered, "key")])
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", SPEAK, hello.hex()]
    # The current folder precedes PYTHONPATH.
    output = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return [bytes.fromhex(frame) for frame in output.stdout.split()]


def test_the_later_release_has_a_message_of_its_own(tmp_path: Path) -> None:
    """This release reads the later one's frames of the common version, not of its newest one."""
    tree = later_release(tmp_path / "later")
    assert Release.of(tree).newest == EDITED_VERSION
    frames = FrameReader()
    welcome, reply = spoken(tree, EDITED_VERSION - 1)
    assert list(frames.feed(welcome)) == [RpcWelcome(EDITED_VERSION - 1)]
    assert len(list(frames.feed(reply))) == 1
    for frame in spoken(tree, EDITED_VERSION):
        with pytest.raises(RpcProtocolError, match="invalid frame"):
            list(FrameReader().feed(frame))
