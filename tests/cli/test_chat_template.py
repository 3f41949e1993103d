"""`--chat-template`, a file or a text: used for prompts by `serve`, `up` and `router`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import baton.cli
import baton.cli.router
import baton.cli.serve
import baton.server.run
from baton.errors import ConfigError
from baton.router import RouterConfig, build_app
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer, read_template_option
from testkit.servers.fake_serving import FakeEngine, served, write_tokenizer

TEXT = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


class _Stop(BaseException):
    """Ends a command where it would begin to serve."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def told(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    with pytest.raises(_Stop):
        baton.cli.main([*arguments, "--port", "0"])


def test_serve_renders_chats_with_the_given_template(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.jinja").write_text(TEXT)
    found: list[Tokenizer] = []

    def run_engine(make_engine: Any, make_app: Any, *more: Any) -> None:
        found.append(make_app.keywords["tokenizer"])
        raise _Stop

    monkeypatch.setattr(baton.server.run, "run_engine", run_engine)
    as_lists = ["--chat-template", "{{ messages[0].content }}", "--chat-template-content-format", "openai"]
    for given in ([], ["--chat-template", TEXT], ["--chat-template", str(tmp_path / "own.jinja")], as_lists):
        told(monkeypatch, "serve", str(directory), *given)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) for tokenizer in found]
    assert prompts == ["<bos><user>a\n<assistant>", "<bos>[a]>", "<bos>[a]>", "[{'type': 'text', 'text': 'a'}]"]


def test_up_and_router_pass_the_template_on(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[RouterConfig] = []

    async def serve_router(config: RouterConfig, *more: Any, **others: Any) -> None:
        found.append(config)
        raise _Stop

    class Deployment:
        prefill_urls = decode_urls = both_urls = ()
        ticket_key_file = str(tmp_path / "ticket.key")

        def __init__(self, *arguments: Any, engine_flags: list[str], **more: Any) -> None:
            assert "--chat-template" not in engine_flags, "engines get tokens"

        def __enter__(self) -> Deployment:
            return self

        def __exit__(self, *exc: object) -> None:
            """Nothing was started."""

    monkeypatch.setattr(baton.cli.serve, "Deployment", Deployment)
    for module in (baton.cli.serve, baton.cli.router):
        monkeypatch.setattr(module, "serve_router", serve_router)
    given = ["--chat-template", TEXT, "--chat-template-content-format", "openai"]
    told(monkeypatch, "up", str(directory), *given)
    told(monkeypatch, "router", "--both", "http://127.0.0.1:1", *given)
    assert [config.chat_template for config in found] == [TEXT, TEXT]
    assert [config.chat_template_content_format for config in found] == ["openai", "openai"]


async def test_a_router_makes_prompts_with_it(directory: Path) -> None:
    engine = FakeEngine(directory)
    async with contextlib.AsyncExitStack() as stack:
        app = build_engine_app(engine, Tokenizer.load(directory))  # type: ignore[arg-type]
        url = await stack.enter_async_context(served(app))
        config = RouterConfig(both=(url,), chat_template=TEXT, chat_template_content_format="openai")
        router = await build_app(config)
        front = await stack.enter_async_context(served(router))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        async with session.post(f"{front}/v1/chat/completions", json=body) as response:
            assert response.status == 200
    (request,) = engine.requests
    assert (
        Tokenizer.load(directory).decode(request.prompt_token_ids, False) == "<bos>[[{'type': 'text', 'text': 'a'}]]>"
    )


def test_a_chat_template_is_a_file_or_jinja_text(tmp_path: Path) -> None:
    path = tmp_path / "{odd}.jinja"
    path.write_text("{{ messages }}")
    assert read_template_option(str(path)) == "{{ messages }}", "a file goes before a text"
    assert read_template_option("a\nb") == "a\nb"
    long = "{{ messages }}" * 1000
    assert read_template_option(long) == long
    (tmp_path / "bytes").write_bytes(b"\xff{{")
    for given in ("", "none.jinja", str(tmp_path), str(tmp_path / "bytes"), "a" * 5000, "a\0b", "{{ a", "{% x %}"):
        with pytest.raises(ConfigError) as refused:
            read_template_option(given)
        assert refused.value.field == "chat_template"
