"""A prefill rank is stopped during a write, its engine core is killed, and the rank continues.

No foreign byte may arrive. Real processes and NIXL over TCP, without vLLM engines: an engine core
that serves the metadata of two prefill ranks, and a decode rank. Rank 1 stops itself (SIGSTOP) when
its write is posted. The core is killed; nothing listens on its port any more. As soon as the decode
rank reports that its blocks are free, they are filled with the next request's bytes. Then rank 1
continues (SIGCONT), as its write does, and ends as vLLM's workers do without their core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import psutil
import torch

from connectors.codec import encode_agent_metadata
from connectors.planning.descriptors import Runs
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.protocol.agent_metadata import AgentMetadata, ModelIdentity
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress, prompt_digest
from connectors.transport.nixl import NixlTransport
from connectors.vllm_hma.config import ConnectorConfig
from connectors.vllm_hma.handshake import probe
from connectors.vllm_hma.handshake.processes import own_process
from connectors.vllm_hma.handshake.side_channel import MetadataServer
from connectors.vllm_hma.orders import Chunk, Expect, Orders, Receive
from connectors.vllm_hma.worker_side.runtime import WorkerRuntime
from connectors.vllm_hma.worker_side.steps import StepFence
from testing.reports import report_of
from tests.campaigns.runner import Report

HEAD_BYTES = 32 * 2**20
"""Bytes of one block on one prefill rank: more than a socket accepts at once, so a stopped rank
is in mid-write.
"""
BLOCKS, BLOCK_TOKENS, RANKS = 2, 4, 2
LIMITS = TransferLimits(handshake_s=20.0, progress_s=1.0, alive_s=0.2, cancel_s=0.3, lease_s=5.0)
CONFIG = ConnectorConfig(integrity="off", **asdict(LIMITS))
DIGEST = prompt_digest([1, 2, 3])
WATCH_S = 3.0
"""Observation time of the decode rank while the stopped rank may still write: several rounds of
the probe.
"""
CONFIRM_S = 0.5
SHUTDOWN_S = 1.0
"""Time for which a prefill rank continues without its core."""
NEXT_OWNER = 42
CONTEXT = multiprocessing.get_context("fork")


class NoFreeBlocksError(AssertionError):
    """The decode rank did not get its blocks back."""


@dataclass
class Outcome:
    """Result of one round.

    ``delivered``: the write ended before the rank had stopped, and the KV is complete.
    """

    delivered: bool
    freed_while_stopped: bool
    freed_after_s: float
    foreign_bytes: int


def layout_of(cache: np.ndarray, rank: int, tp_size: int) -> EngineLayout:
    """One full-attention layer of RANKS heads, split over ``tp_size`` ranks."""
    heads, address = RANKS // tp_size, cache.ctypes.data
    stride = heads * HEAD_BYTES
    pages = LayerPages("layer", address, stride, RANKS, heads, HEAD_BYTES, 1, HEAD_BYTES, HEAD_BYTES, "p")
    region = Region(address, BLOCKS * stride, MemoryKind("DRAM", 0))
    return EngineLayout(rank, tp_size, BLOCKS, (region,), (Group(0, GroupKind.FULL, BLOCK_TOKENS, None, (pages,)),))


class Rank:
    """A WorkerRuntime over a numpy cache with its own NIXL agent."""

    def __init__(self, incarnation: str, rank: int, tp_size: int, transport: type[NixlTransport]) -> None:
        self.cache = np.zeros((BLOCKS, RANKS // tp_size * HEAD_BYTES), np.uint8)
        layout = layout_of(self.cache, rank, tp_size)
        agent = transport(f"{incarnation}/{rank}", devices=("lo",))
        agent.register(layout.regions)
        identity = ModelIdentity("model", "float32", "auto", "0")
        self.agent_metadata = AgentMetadata(incarnation, identity, layout, agent.kind, agent.metadata(), own_process())
        self.runtime = WorkerRuntime(CONFIG, self.agent_metadata, agent, StepFence(torch.device("cpu")))

    def step(self, **orders: Any) -> None:
        self.runtime.before_forward(Orders(**orders))
        self.runtime.after_forward(Orders(**orders))


class StopsInMidWrite(NixlTransport):
    """Transport that stops its process as soon as a write is posted."""

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        handle = super().write(peer, runs, source, target)
        # Signal this thread: it stops the process before it continues; any other thread would have
        # to wake up first.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return handle


def prefill_rank(incarnation: str, rank: int, core: Connection, alive: Connection) -> None:
    """Send its agent metadata to the core, compute on command, and end SHUTDOWN_S after its
    core.
    """
    worker = Rank(incarnation, rank, RANKS, StopsInMidWrite if rank else NixlTransport)
    worker.cache[:] = 7
    core.send(encode_agent_metadata(worker.agent_metadata))

    def end_with_core() -> None:
        try:
            alive.recv()
        except EOFError:
            time.sleep(SHUTDOWN_S)
            os._exit(0)

    threading.Thread(target=end_with_core, daemon=True).start()
    core.recv()
    worker.step(expects=[Expect("q", "t", BLOCK_TOKENS, DIGEST)])
    worker.step(chunks=[Chunk("q", ((1,),), BLOCK_TOKENS)])
    time.sleep(600)


def engine_core(incarnation: str, main: Connection) -> None:
    """Start the ranks, serve their agent metadata, and send ``main`` the port and the ranks'
    process ids.
    """
    ranks = []
    for rank in range(RANKS):
        ours, theirs = CONTEXT.Pipe()
        reader, writer = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            # Daemonic: a core that fails ends without waiting for its ranks.
            target=_without,
            args=(prefill_rank, [ours, writer], incarnation, rank, theirs, reader),
            daemon=True,
        )
        process.start()
        reader.close()
        ranks.append((process, ours, writer))
    rank_metadata = [report_of(process, connection) for process, connection, _ in ranks]
    server = MetadataServer("127.0.0.1", 0, rank_metadata)
    main.send((server.port, [process.pid for process, _, _ in ranks]))
    main.recv()
    for _, connection, _ in ranks:
        connection.send("compute")
    time.sleep(600)


def _without(run: Callable[..., None], inherited: list[Connection], *arguments: Any) -> None:
    """A forked child closes its parent's ends first: an open end would hide the parent's death."""
    for connection in inherited:
        connection.close()
    run(*arguments)


def decode_rank(address: EngineAddress, main: Connection, damage: float) -> None:
    """Request the KV and report when its blocks are free; fill them with the next owner's bytes
    at once.
    """
    probe.CONFIRM_S = CONFIRM_S
    worker = Rank("decode", 0, 1, NixlTransport)
    receive = Receive("r", "t", address, DIGEST, ((1,),), 0, BLOCK_TOKENS - 1)
    worker.step(receives=[receive])
    main.send("asked")
    ended, failed, kept, freed_at = False, False, False, 0.0
    while not main.poll():
        _, received, without = worker.runtime.results()
        told = worker.runtime.report()
        report = None if told is None else told.quarantine
        ended, failed = ended or "r" in received, failed or "r" in without
        kept = (kept or (report is not None and bool(report.begun))) and not (report is not None and report.ended)
        if ended and not kept and not freed_at:
            freed_at = time.monotonic()
            worker.cache[1] = NEXT_OWNER
            main.send((freed_at, not failed))
        time.sleep(0.01)
    worker.cache[1, : int(damage)] = 0
    main.send(int((worker.cache[1] != NEXT_OWNER).sum()) if freed_at else -1)
    os._exit(0)


def play(number: int, last_signal: signal.Signals = signal.SIGCONT, damage: float = 0.0) -> Outcome:
    """Run one round, in which ``last_signal`` goes to the stopped rank.

    Raises NoFreeBlocksError if the blocks are not released after the rank has ended.
    """
    incarnation = f"prefill-{os.getpid()}-{number}"
    core_end, core_child = CONTEXT.Pipe()
    core = CONTEXT.Process(target=engine_core, args=(incarnation, core_child))
    core.start()
    processes: list[BaseProcess] = [core]
    pids: list[int] = []
    try:
        port, pids = report_of(core, core_end)
        decode_end, decode_child = CONTEXT.Pipe()
        decode = CONTEXT.Process(
            target=decode_rank, args=(EngineAddress(incarnation, "127.0.0.1", port), decode_child, damage)
        )
        decode.start()
        processes.append(decode)
        assert report_of(decode, decode_end) == "asked"
        core_end.send("compute")
        stopped = psutil.Process(pids[1])
        _until(lambda: stopped.status() == psutil.STATUS_STOPPED, 60.0)
        core.kill()
        core.join()
        freed_while_stopped = decode_end.poll(LIMITS.progress_s + LIMITS.cancel_s + WATCH_S)
        continued_at = time.monotonic()
        os.kill(pids[1], last_signal)
        _until(lambda: not psutil.pid_exists(pids[1]), 30.0)
        if not decode_end.poll(30.0):
            raise NoFreeBlocksError(
                "the decode rank's blocks are still in quarantine 30 s after the prefill rank's end"
            )
        freed_at, delivered = report_of(decode, decode_end)
        time.sleep(1.0)
        decode_end.send("end")
        return Outcome(delivered, freed_while_stopped, freed_at - continued_at, report_of(decode, decode_end))
    finally:
        for pid in pids:
            _kill(pid)
        for process in processes:
            process.kill()
            process.join()


def _until(condition: Callable[[], bool], within_s: float) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {within_s:g} s"
        time.sleep(0.02)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def stopped_rank(report: Report, *, count: int = 50, kill: bool = False, damage: float = 0.0) -> None:
    """``kill``: the stopped rank is killed instead of continued; ``damage``: a byte is foreign."""
    os.environ["UCX_TLS"] = "tcp"
    stopped = 0
    for number in range(count):
        with report.case(f"round {number}"):
            outcome = play(number, signal.SIGKILL if kill else signal.SIGCONT, damage)
            report.row(round=number, **dataclasses.asdict(outcome))
            report.equal(f"round {number}: foreign bytes", outcome.foreign_bytes, 0)
            early = outcome.freed_while_stopped and not outcome.delivered
            report.check(not early, f"round {number}: blocks were freed while the rank could write")
            stopped += not outcome.delivered
    report.check(stopped or count < 5, "no rank was stopped in mid-write")
