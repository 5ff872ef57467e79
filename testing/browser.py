"""Open a page in Debian's Chromium, headless, over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
WAIT_S = 60
"""Time limit in seconds of a start and of a condition, far above any pause of the machine."""

_FLAGS = """
    --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --remote-debugging-port=0
    --window-size=1220,1100 about:blank
"""


class Page:
    """One tab. ``problems`` has its console errors, exceptions and refused loads."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)

    async def read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(str(event["params"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        found: dict[str, Any] = await asyncio.wait_for(answer, WAIT_S)
        assert "error" not in found, found
        return dict(found["result"])

    async def evaluate(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                if await self.evaluate(expression):
                    return
                await asyncio.sleep(0.1)

    async def picture(self, scheme: str) -> bytes:
        """Return a PNG of the whole page in the colour scheme ``light`` or ``dark``."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        return base64.b64decode((await self.call("Page.captureScreenshot", captureBeyondViewport=True))["data"])


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncGenerator[Page, None]:
    """Open ``url`` in a new browser; its profile and log go into ``folder``."""
    assert CHROMIUM is not None
    with (folder / "chromium.log").open("wb") as log:
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM, f"--user-data-dir={folder}/profile", *_FLAGS.split(), stdout=log, stderr=log
        )
    try:
        async with aiohttp.ClientSession() as session:
            port = await _port(folder / "profile" / "DevToolsActivePort")
            async with session.get(f"http://127.0.0.1:{port}/json/list") as listed:
                (tab,) = [one for one in await listed.json() if one["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                reading = asyncio.create_task(page.read())
                for domain in ("Runtime", "Log", "Page"):
                    await page.call(f"{domain}.enable")
                await page.call("Page.navigate", url=url)
                await page.until(f"location.href.startsWith('{url}') && document.readyState === 'complete'")
                try:
                    yield page
                finally:
                    reading.cancel()
    finally:
        browser.terminate()
        await browser.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(WAIT_S):
        while True:
            if len(lines := _lines(file)) == 2:
                return int(lines[0])
            await asyncio.sleep(0.1)


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="ascii").splitlines() if file.exists() else []
