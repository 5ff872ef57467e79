"""Pairs of engines, of which one runs at a time, and requests through both engines of a pair."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from multiprocessing import resource_tracker
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.namespace import Namespace
from testing.engines import start_engine
from testing.legs import Leg, leg
from testing.models import VOCABULARY
from testing.processes import Arm, Processes, children, environment, own_cores, pin
from testing.sequential_proxy import PRODUCE

MODULES = {
    "TandemConnector": "connectors.vllm_hma.connector",
    "TandemStoreConnector": "connectors.vllm_hma.store_connector",
    "SlowDiskConnector": "benchmarks.slow_disk",
}
ROLES = ("kv_producer", "kv_consumer")
REQUEST_S = 300.0

Side = tuple[AsyncLLM, set[int]]
"""An engine and the ids of its processes."""


def transfer_config(role: str, connector: str = "TandemConnector", **settings: Any) -> KVTransferConfig:
    """Return the configuration of vLLM's or Tandem's connector; ``settings`` are Tandem's."""
    return KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=MODULES.get(connector),
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )


def start_side(
    model: str,
    transfer: KVTransferConfig | None,
    prefill_host: Namespace | None = None,
    variables: dict[str, str] | None = None,
    tp_size: int = 1,
    pinned: bool = True,
    **arguments: Any,
) -> Side:
    """Start one engine.

    ``prefill_host``  where prefill engines run; decode engines are at the other end of its link.
                      None: shared memory
    ``pinned``        pin decode to the last core, others to the cores before it; else to none
    """
    resource_tracker.ensure_running()  # not a process of the first engine
    before, cores = children(), own_cores()
    decodes = transfer is not None and transfer.kv_role == "kv_consumer"
    with ExitStack() as stack:
        stack.enter_context(environment({"UCX_TLS": "tcp,self"} if prefill_host else {}))
        stack.enter_context(environment(variables or {}))
        if prefill_host and not decodes:
            stack.enter_context(prefill_host.entered())
        engine = start_engine(model, tp_size, None, kv_transfer_config=transfer, **arguments)
    pids = children() - before
    if pinned:
        cores = cores[-1:] if decodes else cores[:-1] or cores
    pin(pids, cores)
    return engine, pids


def start_arms(
    stack: ExitStack, names: Iterable[str], start: Callable[[str, str], Side], roles: Sequence[str] = ROLES[::-1]
) -> dict[str, Arm]:
    """Start pairs, each engine by the pair's name and its role; they sleep, and end with the stack.

    Unless ``roles`` has another order, decode engines start first: a process that has entered the
    namespace keeps its /sys, where UCX looks for devices.
    """
    names, sides = list(names), {}
    for role in roles:
        for name in names:
            sides[name, role] = engine, pids = start(name, role)
            stack.callback(engine.shutdown)
            processes = Processes(sorted(pids))
            stack.callback(processes.wake)  # before the shutdown, which a stopped process would not see
            # Idle progress threads of vLLM's connector spin, and would take the next engine's core.
            processes.sleep()
    both = {name: [sides[name, role] for role in ROLES] for name in names}
    arms = {name: Arm(sorted(p[1] | d[1]), name, p[0], d[0]) for name, (p, d) in both.items()}
    for arm in arms.values():
        stack.callback(arm.shutdown)  # both engines awake, because one that ends may wait for its peer
    return arms


def random_prompt(dice: random.Random, tokens: int) -> list[int]:
    return [dice.randrange(4, VOCABULARY) for _ in range(tokens)]


async def together(
    arm: Arm,
    address: dict[str, Any],
    prompt: list[int],
    tokens: int,
    modes: tuple[str, str] = ("", ""),
    **produce: Any,
) -> tuple[Leg, Leg]:
    """Send both legs at once, as the router does.

    ``address``  the prefill engine's answer to ``describe``
    ``modes``    beginning of each leg's request id
    ``produce``  further parameters of the prefill leg
    """
    transfer_id = uuid.uuid4().hex
    ours = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    first, second = (f"{mode}-{uuid.uuid4().hex}" for mode in modes)
    legs = asyncio.gather(
        leg(arm.prefill, prompt, 1, ours | produce, first),
        leg(arm.decode, prompt, tokens, address | {"transfer_id": transfer_id}, second),
    )
    return await asyncio.wait_for(legs, REQUEST_S)


async def in_turn(arm: Arm, prompt: list[int], tokens: int, request_id: str | None = None) -> tuple[Leg, Leg]:
    """Send the prefill leg, then the decode leg with its parameters, as public proxies do."""
    prefill = await asyncio.wait_for(leg(arm.prefill, prompt, 1, PRODUCE, request_id), REQUEST_S)
    assert prefill.output.kv_transfer_params is not None
    decode = leg(arm.decode, prompt, tokens, dict(prefill.output.kv_transfer_params), request_id)
    return prefill, await asyncio.wait_for(decode, REQUEST_S)
