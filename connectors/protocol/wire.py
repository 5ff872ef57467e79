"""Messages of a transfer. ``codec.py`` has their frames.

    consumer -> producer   Hello, AwaitStart, Offer, Cancel
    producer -> consumer   Welcome, Refused, Starting, Alive, Fin, Aborted, Failed, Cancelled

A worker drops messages whose receiver is another worker or incarnation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from connectors.planning.blocks import BlockSet


@dataclass(frozen=True, slots=True)
class Peer:
    """One worker of one incarnation."""

    incarnation: str
    rank: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Agent metadata of the consumer worker, with which the producer connects and plans."""

    agent_metadata: bytes
    kind: ClassVar[str] = "hello"


@dataclass(frozen=True, slots=True)
class Welcome:
    """The producer worker has a plan for this consumer worker and accepts its offers."""

    kind: ClassVar[str] = "welcome"


@dataclass(frozen=True, slots=True)
class Refused:
    """The two engines cannot exchange KV."""

    reason: str
    kind: ClassVar[str] = "refused"


@dataclass(frozen=True, slots=True)
class AwaitStart:
    """The consumer has a request without blocks for this transfer.

    Once the prefill request has arrived, the producer sends Alive every alive_s. When it is about
    to compute the prompt, it sends Starting, and repeats it every alive_s until the Offer arrives.
    Aborted or Failed ends the wait.
    """

    transfer_id: str
    number: int = 0
    kind: ClassVar[str] = "await_start"


@dataclass(frozen=True, slots=True)
class Starting:
    """The producer is about to compute the prompt, or has computed it: the consumer can offer."""

    transfer_id: str
    kind: ClassVar[str] = "starting"


@dataclass(frozen=True, slots=True)
class Offer:
    """A consumer worker's blocks to fill, one set per group. Valid once per transfer and worker.

    ``end_token``      first token that the consumer computes itself: only earlier tokens need KV
    ``prompt_digest``  ``params.prompt_digest``, compared by the producer
    ``digest``         whether Fin must have a digest of the written bytes
    ``number``         from one ascending counter of the worker; with it the producer detects late
                       duplicates
    """

    transfer_id: str
    end_token: int
    prompt_digest: str
    groups: tuple[BlockSet, ...]
    digest: bool = False
    number: int = 0
    kind: ClassVar[str] = "offer"


@dataclass(frozen=True, slots=True)
class Alive:
    """The prefill request is queued, computing or held, or KV is written.

    ``left``  number of units of each group that have not arrived with all their layers; empty if
              none has arrived since the last Alive
    """

    transfer_id: str
    left: tuple[int, ...] = ()
    kind: ClassVar[str] = "alive"


@dataclass(frozen=True, slots=True)
class Fin:
    """This producer rank has written its part of the offered blocks and writes no more.

    ``digest``  of the source bytes, 32 hexadecimal digits; empty if not requested
    """

    transfer_id: str
    total_bytes: int
    digest: str = ""
    kind: ClassVar[str] = "fin"


@dataclass(frozen=True, slots=True)
class Aborted:
    """This producer rank will not complete its part of the transfer, and writes no more."""

    transfer_id: str
    reason: str
    kind: ClassVar[str] = "aborted"


@dataclass(frozen=True, slots=True)
class Failed:
    """A write of this producer rank failed. No acknowledgement: parts of it may still arrive."""

    transfer_id: str
    reason: str
    kind: ClassVar[str] = "failed"


@dataclass(frozen=True, slots=True)
class Cancel:
    """The consumer needs no more KV, and keeps its blocks until Fin, Aborted or Cancelled arrives,
    or the producer rank is dead. ``number`` is that of the cancelled Offer or, without an Offer, a
    new number.
    """

    transfer_id: str
    number: int = 0
    kind: ClassVar[str] = "cancel"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Answer to Cancel: the rank writes no more of this transfer to that rank."""

    transfer_id: str
    kind: ClassVar[str] = "cancelled"


ToProducer = Hello | AwaitStart | Offer | Cancel
ToConsumer = Welcome | Refused | Starting | Alive | Fin | Aborted | Failed | Cancelled
Message = ToProducer | ToConsumer


@dataclass(frozen=True, slots=True)
class Envelope:
    sender: Peer
    receiver: Peer
    message: Message
