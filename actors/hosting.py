"""What the prefill and the decode actors have in common: one engine, called as an HTTP application."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import ray
from ray import serve

from actors.asgi_call import Accepted, Call, ResponseStart, call_asgi
from actors.engine import Engine, EngineDownError
from configs.settings import RoleName, ServiceSettings

logger = logging.getLogger(__name__)

CallItem = Accepted | ResponseStart | bytes

FIRST_REQUEST_TIMEOUT_S = 120.0
"""For the first request of an engine's life, which may compile and page in."""


class EngineActor:
    """Hosts one engine. Subclasses name the role."""

    role: RoleName

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.replica = serve.get_replica_context().replica_id.unique_id
        self._engine: Engine | None = None

    async def start(self) -> None:
        """Start the engine; Serve calls the replica ready after this."""
        logger.info("starting the %s engine of replica %s", self.role, self.replica)
        self._engine = await Engine.start(self.settings, self.role, ray.util.get_node_ip_address())

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineDownError(f"the {self.role} engine of replica {self.replica} is not running")
        return self._engine

    async def call(self, call: Call) -> AsyncGenerator[CallItem, None]:
        """Run `call` through vLLM's application; closing the generator aborts the request in the engine."""
        yield Accepted(self.replica)
        engine = self.engine
        async with aclosing(call_asgi(engine.app, call)) as answer:
            async for item in answer:
                await engine.check_health()  # vLLM turns a dead engine into an answer with status 500
                yield item

    async def metrics(self) -> tuple[str, str]:
        """This replica's id and its Prometheus exposition: vLLM's metrics and the connector's."""
        from prometheus_client import REGISTRY, generate_latest

        return self.replica, generate_latest(REGISTRY).decode()

    async def ping(self) -> str:
        """This replica's id, if its engine is alive."""
        await self.engine.check_health()
        return self.replica

    async def check_health(self) -> None:
        """Serve's health check: a replica whose engine died is replaced."""
        await self.engine.check_health()

    async def __del__(self) -> None:
        """Serve's hook at the end of a replica's life (awaited by Serve, not by the collector)."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()
