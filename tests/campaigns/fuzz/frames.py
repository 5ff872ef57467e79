"""Malformed and unexpected frames and agent metadata, from a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from connectors.codec import encode, tag
from connectors.errors import PlanError
from connectors.planning.blocks import BlockSet
from connectors.protocol.agent_metadata import PROTOCOL_VERSION
from connectors.protocol.wire import (
    Aborted,
    Alive,
    AwaitStart,
    Cancel,
    Cancelled,
    Envelope,
    Failed,
    Fin,
    Hello,
    Message,
    Offer,
    Peer,
    Refused,
    Starting,
    Welcome,
)

NUMBERS = (None, True, -1, 0, 1, 4096, 2**20, 2**31, 2**62, 2**63 - 1, 2**63, 10**300, 1.5, float("nan"))
ODD: tuple[Any, ...] = (*NUMBERS, "", "x" * 300, "\x00\ud800é", [], {}, [[[[]]]], [0] * 50)


class Hostile:
    """Source of hostile frames. ``key`` is the secret's, or another; ``me`` is the sender."""

    def __init__(self, rng: random.Random, me: Peer, agent_metadata: bytes, key: bytes) -> None:
        self.rng = rng
        self.me = me
        self.key = key
        self._agent_metadata = agent_metadata

    def frame(self, to: Peer, ids: list[str]) -> bytes:
        """Return one hostile frame of any kind. ``ids`` are transfers that it may name."""
        make = self.rng.choice(
            (self._valid, self._valid, self._flipped, self._cut, self._lying, self._headers, self._noise)
        )
        return make(to, ids)

    def message(self, ids: list[str]) -> Message:
        """Return a well-formed frame that no peer expects."""
        rng = self.rng
        transfer_id = rng.choice(ids)
        makers: list[Callable[[], Message]] = [
            lambda: Hello(self.agent_metadata()),
            Welcome,
            lambda: Refused("no " * rng.randrange(500)),
            lambda: Alive(transfer_id, rng.choice(((), (0,), (0, 1), (2**62, 0), (0, 0, 0)))),
            lambda: Fin(transfer_id, rng.choice((0, 1, 2**62)), rng.choice(("", "0" * 32))),
            lambda: rng.choice((Aborted, Failed))(transfer_id, "because"),
            *(partial(kind, transfer_id) for kind in (Cancelled, Cancel, AwaitStart, Starting)),
            *[lambda: self._offer(transfer_id)] * 2,
        ]
        return rng.choice(makers)()

    def _offer(self, transfer_id: str) -> Offer:
        rng = self.rng
        groups, first = [], 1
        for _ in range(rng.choice((0, 1, 1, 1, 2, 50))):
            count = rng.choice((0, 1, 2, 3, 500))
            step = rng.choice((1, 1, 2**50))
            positions = np.arange(count, dtype=np.int64) * step
            ids = np.arange(first, first + count, dtype=np.int64) + rng.choice((0, 0, 2**40))
            groups.append(BlockSet(positions, ids))
            first += count
        end = rng.choice((0, 1, 5, 6, 2**31, 2**62))
        return Offer(transfer_id, end, rng.choice(("", "x" * 200)), tuple(groups), rng.random() < 0.5)

    def agent_metadata(self) -> bytes:
        """Return our metadata, unchanged or with a few fields changed."""
        if self.rng.random() < 0.3:
            return self._agent_metadata
        document = json.loads(self._agent_metadata)
        for _ in range(self.rng.randrange(1, 4)):
            self._change(document)
        return json.dumps(document).encode(errors="replace")

    def _change(self, document: Any) -> None:
        """Change one value in a document, remove it, or repeat it."""
        while isinstance(document, dict | list) and document:
            keys = list(document) if isinstance(document, dict) else list(range(len(document)))
            key = self.rng.choice(keys)
            inner = document[key]
            if isinstance(inner, dict | list) and inner and self.rng.random() < 0.9:
                document = inner
                continue
            if isinstance(document, dict) and self.rng.random() < 0.1:
                del document[key]
            elif isinstance(document, list) and self.rng.random() < 0.3:
                document.append(inner)
            else:
                document[key] = copy.deepcopy(self.rng.choice(ODD))
            return

    # ---- kinds of hostility ---------------------------------------------------------------------

    def _valid(self, to: Peer, ids: list[str]) -> bytes:
        """Signed, but possibly with a wrong sender or receiver."""
        rng = self.rng
        sender = rng.choice((self.me, self.me, self.me, Peer(self.me.incarnation, 77), Peer("nobody", 2**62)))
        to = rng.choice((to, to, to, Peer(to.incarnation, 5), Peer("another start", to.rank)))
        try:
            return encode(Envelope(sender, to, self.message(ids)), self.key)
        except (PlanError, OverflowError):
            return self._noise(to, ids)

    def _flipped(self, to: Peer, ids: list[str]) -> bytes:
        frame = bytearray(encode(Envelope(self.me, to, self.message(ids)), self.key))
        for _ in range(self.rng.randrange(1, 5)):
            frame[self.rng.randrange(len(frame))] ^= 1 << self.rng.randrange(8)
        return self._signed_or_not(bytes(frame))

    def _cut(self, to: Peer, ids: list[str]) -> bytes:
        frame = encode(Envelope(self.me, to, self.message(ids)), self.key)
        return self._signed_or_not(frame[: self.rng.randrange(len(frame))])

    def _lying(self, to: Peer, ids: list[str]) -> bytes:
        """A length inside the content is wrong."""
        frame = bytearray(encode(Envelope(self.me, to, self.message(ids)), self.key))
        at = self.rng.randrange(4, len(frame) - 32)
        frame[at : at + 1] = self.rng.choice((b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdf", b"\xc1"))
        return self._signed_or_not(bytes(frame))

    def _headers(self, to: Peer, ids: list[str]) -> bytes:
        """Content that is no message: nested deeply, with extreme numbers, of other types."""
        rng = self.rng
        fields: dict[str, Any] = {
            "type": rng.choice(("offer", "hello", "fin", "cancel", "await_start", "starting", "?")),
            "transfer_id": rng.choice(ids),
            "end_token": 5,
            "prompt_digest": "",
            "groups": rng.choice(([], [(b"", b"")], [(b"x", b"")] * 3, [(bytes(8), bytes(16))], [(b"", b"")] * 2000)),
            "digest": False,
            "number": 0,
        }
        content: Any = [[self.me.incarnation, self.me.rank], [to.incarnation, to.rank], fields]
        for _ in range(rng.randrange(3)):
            self._change(content)
        try:
            encoded = msgspec.msgpack.encode(content)
        except (OverflowError, UnicodeEncodeError):
            encoded = rng.randbytes(1000)
        if rng.random() < 0.2:
            encoded = b"\x91" * rng.randrange(1, 60_000)
        content = b"TDM" + bytes([PROTOCOL_VERSION]) + encoded
        return content + tag(content, self.key)

    def _noise(self, to: Peer, ids: list[str]) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, 7, 8, 40, 1000, 100_000)))

    def _signed_or_not(self, frame: bytes) -> bytes:
        """Return the frame with a valid tag, or unchanged."""
        return frame if self.rng.random() < 0.5 else frame[:-32] + tag(frame[:-32], self.key)
