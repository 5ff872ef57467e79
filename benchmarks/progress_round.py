"""Cost of a progress thread's round under its lock, by number of remembered transfers.

    python -m benchmarks.progress_round [--remembered 600,6000] [--rounds 2000]

Runs both machines and the calls of the progress thread in every round, without a transport:
deadlines, whether a transfer is in progress, which workers to probe. *Remembered* transfers have
ended (a producer and a consumer know their ids for lease_s); *open* ones are in progress. Prints
milliseconds per round: the median of nine series.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from connectors.planning.blocks import BlockSet, UnitShape
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.consumer import Consumer
from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.engines import Partner
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress
from connectors.protocol.producer import Producer
from connectors.protocol.reception import Order
from connectors.protocol.wire import Fin, Offer, Peer

GROUPS = (Group(0, GroupKind.FULL, 16, None, ()),)
SHAPES = (UnitShape(16, 1, 1),)
LIMITS = TransferLimits(lease_s=1e6, progress_s=1e6, forget_s=1e9)
TOKENS, BYTES = 32, 100
PREFILL, DECODE = Peer("prefill", 0), Peer("decode", 0)
ENGINE = EngineAddress(PREFILL.incarnation, "host", 1)
SERIES = 9


def machines(remembered: int, in_flight: int) -> tuple[Producer, Consumer]:
    """Return a producer and a consumer with these numbers of ended and queued transfers."""
    producer, consumer = Producer(GROUPS, LIMITS), Consumer(GROUPS, LIMITS)
    producer.welcome(DECODE, ConsumerPeer(frozenset({0}), 10**9, SHAPES), 0.0)
    consumer.connected(ENGINE.incarnation, [Partner(PREFILL, SHAPES, (BYTES,), met_at=ENGINE)], 0.0)
    blocks = (BlockSet(np.arange(2), np.array([1, 2])),)
    for number in range(remembered + in_flight):
        request, transfer = f"r{number}", f"t{number}"
        consumer.start(Order(request, transfer, ENGINE, TOKENS - 1, "p", blocks), 0.0)
        producer.expect(request, transfer, TOKENS, "p", 0.0)
        producer.message(DECODE, Offer(transfer, TOKENS - 1, "p", blocks, number=number + 1), 0.0)
        if number < remembered:
            (write,) = producer.progress(request, [[1, 2]], TOKENS, 0.0)
            producer.write_posted(write.write_id, 2 * BYTES)  # type: ignore[union-attr]
            producer.write_done(write.write_id, 0.0)  # type: ignore[union-attr]
            producer.finished(request, True, "", 0.0)
            consumer.message(PREFILL, Fin(transfer, 2 * BYTES), 0.0)
    return producer, consumer


def one_round(producer: Producer, consumer: Consumer, now: float) -> None:
    """Run the calls of ``WorkerRuntime`` to its machines in one round of the progress thread."""
    producer.tick(now)
    consumer.tick(now)
    consumer.suspects()
    _ = producer.busy, consumer.busy


def milliseconds(remembered: int, in_flight: int, rounds: int) -> float:
    producer, consumer = machines(remembered, in_flight)
    series = []
    for _ in range(SERIES):
        started_at = time.perf_counter()
        for _ in range(rounds):
            one_round(producer, consumer, 0.5)
        series.append((time.perf_counter() - started_at) / rounds * 1e3)
    return statistics.median(series)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remembered", default="0,600,6000")
    parser.add_argument("--open", default="0,100", dest="in_flight")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    print("| remembered | open | ms per round |\n|---|---|---|")
    for in_flight in map(int, arguments.in_flight.split(",")):
        for remembered in map(int, arguments.remembered.split(",")):
            print(f"| {remembered:,} | {in_flight} | {milliseconds(remembered, in_flight, arguments.rounds):.4f} |")


if __name__ == "__main__":
    main()
