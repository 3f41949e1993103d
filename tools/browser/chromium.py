"""A real Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Tab:
    """One page. `errors`: messages of scripts that failed, and of what the page's policy refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            told = json.loads((await self._socket.receive()).data)
            if told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(told["params"]["exceptionDetails"].get("exception", told)))
            if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(told["params"]["entry"]["text"])
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]

    async def open(self, url: str) -> None:
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, its result."""
        told = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        for _ in range(1200):
            if await self.value(f"Boolean({expression})"):
                return
            await asyncio.sleep(0.05)
        shown = await self.value("document.body.innerText")
        raise AssertionError(f"{expression} never became true; the page shows:\n{shown}")

    async def press(self, key: str, code: int, text: str | None = None) -> None:
        more = {} if text is None else {"text": text}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, path: Path, width: int, height: int) -> None:
        """Write the upper left part of the page as a WebP file."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        told = await self.call("Page.captureScreenshot", format="webp", quality=80, clip=clip)
        path.write_bytes(base64.b64decode(told["data"]))


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """Run Chromium with one empty page."""
    assert CHROMIUM is not None
    # Chromium puts a Unix socket into TMPDIR and does not start if that is missing or its path is too long.
    with tempfile.TemporaryDirectory(prefix="chromium-", dir="/tmp", ignore_cleanup_errors=True) as own:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *_FLAGS,
            f"--user-data-dir={own}/profile",
            "about:blank",
            env={**os.environ, "TMPDIR": own, "HOME": own},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        draining: asyncio.Task[bytes] | None = None
        said: list[str] = []
        try:
            assert process.stderr is not None
            address = ""
            while not address:
                line = (await process.stderr.readline()).decode(errors="replace")
                said.append(line)
                assert line or process.returncode is None, f"chromium ended: {said[-5:]}"
                if line.startswith("DevTools listening on "):
                    address = line.split()[-1]
            draining = asyncio.create_task(process.stderr.read())
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{address.split('/')[2]}/json/list") as response:
                    (page,) = [one for one in await response.json() if one["type"] == "page"]
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if draining is not None:
                await draining
