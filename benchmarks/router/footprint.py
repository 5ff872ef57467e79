"""Count the files, classes and tasks of `app/` and `actors/` that one streamed chat request uses.

    python -m benchmarks.router.footprint [--list]

Router, HTTP server, connections and the engines' actors run in this process; only vLLM and Ray
Serve are missing. A first request opens connections and is not counted. Files of vLLM's patches and
of the connector are not reached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from actors.engine_pool import discovery
from actors.engine_pool.engines import EnginePool
from actors.router.models.model_router import ModelEngines
from actors.router.peer_routers import RouterReplica
from app.http.http_server import HttpServer
from app.http.routes import build_http
from benchmarks.router.engine import complete
from benchmarks.router.service import SLOTS, Instant
from configs.settings.base import RoleName
from configs.settings.router import RouterLimits, RoutingSettings
from testing.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(f"{ROOT}/{package}/" for package in ("app", "actors"))
ENGINE_SIDE = ("actors.engine.", "actors.rpc.server", "actors.upstream.")
"""Modules that run in the engine's actor; all others run in the router."""

BODY = {
    "model": "instant",
    "messages": [{"role": "user", "content": "a prompt of a few words"}],
    "stream": True,
    "max_tokens": 4,
}


class Engine(Instant):
    """An instant engine outside Ray."""

    def __init__(self) -> None:
        """Do nothing: `pool` opens the actor."""

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing to close: `pool` registers the server's `close` in its stack."""

    async def pool(self, role: RoleName, stack: AsyncExitStack) -> EnginePool:
        """Start to listen; return the pool with which a router calls this engine."""
        application = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
        await self.open(role, f"{role} 0", application, None)
        stack.push_async_callback(self._rpc_servers[0].close)
        metadata = {self.replica: {**self.record_replica_metadata(), "slots": SLOTS}}
        discovery.publish(self.role, metadata)
        handle: Any = SimpleNamespace(deployment_id=self.role)
        handle.options = lambda: handle
        pool = EnginePool("decode", handle)
        stack.push_async_callback(pool.close)
        return pool


class Footprint:
    """Profile of this thread while it is `on`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.classes: set[tuple[str, str]] = set()
        self.created: set[tuple[str, str]] = set()
        """Classes of which the request creates an object."""
        self.tasks: list[str] = []
        self.on = False

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call":
            return
        if frame.f_code.co_filename.startswith(PRODUCT):
            self.files.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))
        # Generated methods of dataclasses have no file.
        owner = type(frame.f_locals.get("self"))
        if owner.__module__.split(".")[0] in ("app", "actors"):
            name = (owner.__module__, owner.__qualname__)
            self.classes.add(name)
            if frame.f_code.co_name == "__init__":
                self.created.add(name)

    def make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        code = getattr(coroutine, "cr_code", None)
        if self.on and code is not None and code.co_filename.startswith(PRODUCT):
            self.tasks.append(f"{code.co_filename.removeprefix(f'{ROOT}/')}: {code.co_qualname}")
        return asyncio.Task(coroutine, loop=loop, **options)


def in_engine(module: str) -> bool:
    """Return whether a module, or a file, belongs to the engine's side."""
    return module.removesuffix(".py").replace("/", ".").startswith(ENGINE_SIDE)


async def ask(port: int) -> bytes:
    """Send the request; return the whole response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    response = await reader.read()
    writer.close()
    return response


async def measure() -> Footprint:
    """Serve two requests, and return what the second one used."""
    found = Footprint()
    asyncio.get_running_loop().set_task_factory(found.make_task)
    limits = RouterLimits(routing=RoutingSettings(policy="always_remote"))
    async with AsyncExitStack() as stack:
        engines = Engine(), Engine()
        prefill, decode = await engines[0].pool("prefill", stack), await engines[1].pool("decode", stack)
        router = RouterReplica(limits, ModelEngines(prefill, decode))
        port = free_port()
        server = HttpServer(build_http(router), "127.0.0.1", port, 0.0, "footprint")
        await server.open()
        stack.push_async_callback(server.close)
        for counted in (False, True):
            found.on = counted
            sys.setprofile(found.profile)
            response = await ask(port)
            await asyncio.sleep(0.1)
            found.on = False
            sys.setprofile(None)
            assert b"x-tandem-route: remote" in response, response
            assert response.count(b"data: ") > BODY["max_tokens"], response  # type: ignore[operator]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also print the names")
    options = parser.parse_args()
    found = asyncio.run(measure())
    tasks = [task for task in found.tasks if not in_engine(task.split(":")[0])]
    for kind, names in (
        ("files", sorted(found.files)),
        ("files in the router", sorted(file for file in found.files if not in_engine(file))),
        ("classes", sorted(".".join(one) for one in found.classes)),
        ("classes in the router", sorted(".".join(one) for one in found.classes if not in_engine(one[0]))),
        ("classes created in the router", sorted(".".join(one) for one in found.created if not in_engine(one[0]))),
        ("tasks in the router", tasks),
    ):
        print(f"{len(names):4d} {kind}")
        if options.list:
            print("".join(f"       {name}\n" for name in names), end="")


if __name__ == "__main__":
    main()
