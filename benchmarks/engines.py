"""Pairs of engines, of which one runs at a time.

An *arm* is a prefill and a decode engine with one connector. Requests alternate between the arms.
The idle arm is stopped (SIGSTOP), because NIXL's progress threads, which vLLM's connector starts,
spin when idle and would slow the other arm down.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from testing.engines import Answer, Pair, describe, start_engine
from testing.hosts import Switch
from testing.models import VOCABULARY
from testing.processes import Processes, children, environment, own_cores, pin

ROLES = ("kv_producer", "kv_consumer")
REQUEST_S = 300.0
PLAIN: dict[str, Any] = {"logprobs": None}

Side = tuple[AsyncLLM, set[int]]
"""An engine and the ids of its processes."""


def start_side(
    model: str,
    role: str | None,
    link: Switch | None = None,
    variables: dict[str, str] | None = None,
    tp_size: int = 1,
    pinned: bool = True,
    **arguments: Any,
) -> Side:
    """Start one engine.

    ``role``    None: without a connector
    ``link``    between the hosts of prefill and decode engines, named by ROLES; None: shared memory
    ``pinned``  pin decode to the last core, others to the cores before it; else to none
    """
    resource_tracker.ensure_running()  # not a process of the first engine
    before, cores = children(), own_cores()
    with ExitStack() as stack:
        stack.enter_context(environment({"UCX_TLS": "tcp,self"} if link else {}))
        stack.enter_context(environment(variables or {}))
        if link is not None and role is not None:
            stack.enter_context(link.hosts[role].entered())
        engine = start_engine(model, tp_size, role, **arguments)
    pids = children() - before
    if pinned:
        cores = cores[-1:] if role == "kv_consumer" else cores[:-1] or cores
    pin(pids, cores)
    return engine, pids


@dataclass
class Arm(Processes):
    """A pair of engines with one connector, and the ids of all their processes."""

    name: str
    pair: Pair

    async def together(
        self, prompt: list[int], tokens: int, modes: tuple[str, str] = ("", ""), **produce: Any
    ) -> Answer:
        """Send both legs at once, as the router does.

        ``modes``    beginning of each leg's request id
        ``produce``  further parameters of the prefill leg
        """
        legs = [PLAIN | {"request_id": f"{mode}-{uuid.uuid4().hex}"} for mode in modes]
        return await asyncio.wait_for(self.pair.together(prompt, tokens, *legs, **produce), REQUEST_S)

    async def in_turn(self, prompt: list[int], tokens: int, **more: Any) -> Answer:
        """Send the prefill leg, then the decode leg with its parameters, as public proxies do."""
        return await asyncio.wait_for(self.pair.in_turn(prompt, tokens, more, PLAIN | more), REQUEST_S)

    def shutdown(self) -> None:
        self.wake()
        self.pair.decode.shutdown()
        self.pair.prefill.shutdown()


async def start_arms(stack: ExitStack, names: Iterable[str], start: Callable[[str, str], Side]) -> dict[str, Arm]:
    """Start pairs, each engine by the pair's name and its role; they sleep, and end with the stack.

    Pairs of Tandem know the address of their prefill engine.
    """
    arms = {}
    for name in names:
        pids, engines = list[int](), list[AsyncLLM]()
        for role in ROLES:
            engine, own = start(name, role)
            stack.callback(engine.shutdown)
            processes = Processes(sorted(own))
            stack.callback(processes.wake)  # before the shutdown, which a stopped process would not see
            # Idle progress threads of vLLM's connector spin, and would take the next engine's core.
            processes.sleep()
            pids, engines = pids + processes.pids, [*engines, engine]
        arm = arms[name] = Arm(pids, name, Pair(engines[0], engines[1], {}))
        stack.callback(arm.shutdown)  # both engines awake, because one that ends may wait for its peer
        transfer = engines[0].vllm_config.kv_transfer_config
        if transfer is not None and "Nixl" not in str(transfer.kv_connector):
            with arm.awake():
                arm.pair.address = await describe(engines[0])
    return arms


def random_prompt(dice: random.Random, tokens: int) -> list[int]:
    return [dice.randrange(4, VOCABULARY) for _ in range(tokens)]
