"""Run other clients against a server, print the exchanges, and keep their requests for the tests.

    python -m tools.record_clients [--client NAME] [--url http://127.0.0.1:8000] [--output tests/clients/recorded]

The server needs `--served-model-name demo --enable-auto-tool-choice --tool-call-parser hermes`. Without `--url` it is
the router over the tests' stand-ins of vLLM servers, which call a tool whenever there is one, so that each client sends
a call's result. Load generators need a vocabulary that their own libraries can read, so they run against `baton up`.
Each client has its own environment, made in the user's cache by its first run (up to 2 GB). Without `--output` nothing
is written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from baton.event_loop import timeout
from baton.openai.http.serving import bind, served, url_of
from testkit.clients.deployments import before_vllm, embedded

HERE = Path(__file__).parent
CLIENTS = {
    "langchain": ("langchain-openai==1.7.3", "openai==2.54.0"),
    "litellm": ("litellm[mcp]==1.106.2", "openai==2.54.0"),
    "llm": ("llm==0.32.1", "openai==2.54.0"),
    "anthropic": ("anthropic==2.13.0",),
    "openai_agents": ("openai-agents==0.24.0",),
    "aider": ("aider-chat==0.86.2",),
    "guidellm": ("guidellm==0.8.1",),
    "aiperf": ("aiperf==0.13.0",),
}
LOADS = {"guidellm", "aiperf"}
LIMIT_S = 240


class Recorder:
    """Forwards requests to the server at `url`, and keeps requests and answers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.requests: list[dict[str, str]] = []
        self.answers: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        """Forward one exchange; a streamed answer is returned whole."""
        body = await request.read()
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self._url + request.path_qs, data=body, headers=_passed(request)) as reply,
        ):
            answer = await reply.read()
        if body:
            self.requests.append({"path": request.path, "body": body.decode()})
            self.answers.append(f"{reply.status} {answer.decode()}")
        return web.Response(
            status=reply.status, body=answer, headers={"Content-Type": reply.headers.get("Content-Type", "")}
        )


def _passed(request: web.Request) -> dict[str, str]:
    return {
        name: value for name, value in request.headers.items() if name in ("Content-Type", "Authorization", "X-Api-Key")
    }


def environment(client: str) -> Path:
    """A client's interpreter. Raises `subprocess.CalledProcessError` if pip fails; pip's output says why."""
    wanted = CLIENTS[client]
    digest = hashlib.sha256("\n".join([*wanted, sys.version]).encode()).hexdigest()[:8]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / f"{client}-{digest}"
    python = root / "bin" / "python"
    done = root / ".installed"
    if not done.exists():
        venv.create(root, with_pip=True, clear=True)
        try:
            subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted], check=True)
        except BaseException:
            shutil.rmtree(root)
            raise
        done.touch()
    return python


async def record(url: str, client: str, python: Path) -> Recorder:
    """Run one client's conversations. Raises `RuntimeError` if the client fails."""
    recorder = Recorder(url)
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", recorder.handle)
    listener = bind("127.0.0.1", 0)
    async with served(app, listener):
        process = await asyncio.create_subprocess_exec(
            *(python, HERE / f"with_{client}.py", f"{url_of(listener, app)}/v1"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        try:
            async with timeout(LIMIT_S):
                said, _ = await process.communicate()
        except asyncio.TimeoutError:
            process.kill()
            raise RuntimeError(f"{client} took more than {LIMIT_S} s") from None
    _show(client, recorder)
    print(said.decode(), flush=True)
    if process.returncode != 0:
        raise RuntimeError(f"{client} failed with status {process.returncode}")
    return recorder


def _show(client: str, recorder: Recorder) -> None:
    print(f"==== {' '.join(CLIENTS[client])}")
    for request, answer in zip(recorder.requests, recorder.answers, strict=True):
        print(f"> {request['path']} {request['body']}\n< {answer}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", choices=CLIENTS, action="append", help="default: all; repeat")
    parser.add_argument("--url", help="base URL of the server, without /v1")
    parser.add_argument("--output", type=Path, help="directory for the recorded requests")
    parser.add_argument("--python", type=Path, help="interpreter that has the clients, instead of an environment made")
    options = parser.parse_args()
    for client in options.client or CLIENTS:
        python = options.python or environment(client)
        with tempfile.TemporaryDirectory() as folder:
            own = (embedded if client in LOADS else before_vllm)(Path(folder))
            with contextlib.nullcontext(options.url.rstrip("/")) if options.url else own as url:
                recorder = asyncio.run(record(url, client, python))
        if options.output is not None:
            found: dict[str, Any] = {"packages": CLIENTS[client], "requests": recorder.requests}
            (options.output / f"{client}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
