"""Records of the LoRA adapters that clients have loaded, in Ray's control store.

A record outlives the engines: an engine that starts later loads the adapter from it. It ends with
an unload, or with the Ray cluster.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import TypeVar

from actors.errors import UnavailableError
from actors.upstream import ray_private

STORE_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class AdapterRecord:
    """One loaded adapter. ``model`` is the suffix of its model's deployments."""

    model: str
    path: str
    is_3d: bool = False
    load: str = ""


class AdapterRecords:
    """Records of one service by adapter name. A name belongs to one model.

    Each method raises UnavailableError if the control store does not answer within STORE_S. Without
    the Ray head an operation blocks its thread for a minute or more. The only thread bounds their
    number; later operations wait for it and time out.
    """

    def __init__(self, app: str) -> None:
        self._prefix = f"adapters/{app}/".encode()
        self._thread = ThreadPoolExecutor(1, "adapter-records")

    async def add(self, name: str, record: AdapterRecord) -> bool:
        """Add a record; return False, and change nothing, if `name` has one."""
        data = json.dumps(astuple(record))
        return not await self._run(lambda: ray_private.store_put(self._key(name), data, overwrite=False))

    async def get(self, name: str) -> AdapterRecord | None:
        data = await self._run(lambda: ray_private.store_get(self._key(name)))
        return None if data is None else AdapterRecord(*json.loads(data))

    async def delete(self, name: str) -> None:
        await self._run(lambda: ray_private.store_delete(self._key(name)))

    async def remove(self, name: str, record: AdapterRecord) -> None:
        """Delete the record of `name` if it is `record`.

        Runs after an `add` that has timed out: the only thread runs the operations in order.
        """
        data = json.dumps(astuple(record)).encode()

        def remove() -> None:
            if ray_private.store_get(self._key(name)) == data:
                ray_private.store_delete(self._key(name))

        await self._run(remove)

    async def names(self) -> list[str]:
        keys = await self._run(lambda: ray_private.store_keys(self._prefix))
        return [key.removeprefix(self._prefix).decode() for key in keys]

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    async def _run(self, do: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(STORE_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, do)
        except Exception as error:  # Ray's errors of a lost head have no common class
            raise UnavailableError(f"Ray's control store does not answer: {error!r}; retry later") from error
