"""The Decode deployment: takes KV over from prefill engines and generates, or serves a request alone."""

import asyncio

from actors.hosting import FIRST_REQUEST_TIMEOUT_S, EngineActor
from actors.hosts import watch_hosts
from configs.settings import ServiceSettings


class Decode(EngineActor):
    """An engine in the role of the consumer."""

    role = "decode"

    async def __init__(self, settings: ServiceSettings) -> None:
        await super().__init__(settings)
        await self.engine.warm_up(FIRST_REQUEST_TIMEOUT_S)
        self._watch = asyncio.create_task(
            watch_hosts(self.engine.lose, settings.transfer.host_gone_s), name="watch-hosts"
        )
