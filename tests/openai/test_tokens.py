"""`/tokenize`, `/detokenize`, `/version`, one model by its name, and messages that the model continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from baton import __version__
from baton.errors import RequestError
from baton.openai.backend import ServedModel
from baton.openai.plan import plan_chat
from baton.openai.requests import ChatRequest, decode_request
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import EOS, MAX_MODEL_LEN, FakeEngine, served, write_tokenizer

BOS = 256
LAST = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b m "}]


async def asked(session: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with session.post(url, json=body) as response:
        return response.status, await response.json()


async def test_tokens_of_texts_and_chats(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    backend.save(str(file))
    engine, tokenizer = FakeEngine(tmp_path), Tokenizer.load(tmp_path)
    async with served(build_app(engine, tokenizer)) as url:
        status, answer = await asked(session, f"{url}/tokenize", {"prompt": "hé", "return_token_strs": True})
        ids = tokenizer.encode("hé")
        assert (status, answer["tokens"], answer["count"]) == (200, ids, len(ids))
        assert answer["token_strs"] == ["<bos>", "h", "Ã", "©"], "as the vocabulary has them, as in vLLM"
        assert answer["max_model_len"] == MAX_MODEL_LEN
        _, plain = await asked(session, f"{url}/tokenize", {"prompt": "hé", "add_special_tokens": False})
        assert plain["tokens"] == tokenizer.encode("hé", add_special_tokens=False) == ids[1:]
        assert plain["token_strs"] is None
        # Exactly the prompt that a chat gets.
        chat = {"messages": [{"role": "user", "content": "a"}]}
        _, shown = await asked(session, f"{url}/tokenize", chat)
        await asked(session, f"{url}/v1/chat/completions", {**chat, "max_tokens": 1})
        assert shown["tokens"] == list(engine.requests[-1].prompt_token_ids)
        # A body that is processed on a worker thread.
        long = {"prompt": "x" * 200, "chat_template_kwargs": {"y" * 5000: 1}}
        assert (await asked(session, f"{url}/tokenize", long))[1]["count"] == 201
        _, text = await asked(session, f"{url}/detokenize", {"tokens": [*ids, EOS]})
        assert text == {"prompt": "<bos>hé<eos>"}


async def test_add_special_tokens_of_completions_and_chats(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    """As in vLLM: a completion's tokenizer adds BOS by default, a chat's does not."""
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    backend.save(str(file))
    engine = FakeEngine(tmp_path)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    num_bos = {}
    async with served(build_app(engine, Tokenizer.load(tmp_path))) as url:
        for path, asks in (("completions", {"prompt": "a"}), ("chat/completions", chat)):
            for added in (None, True, False):
                body = asks | {"max_tokens": 1, "add_special_tokens": added}
                assert (await asked(session, f"{url}/v1/{path}", body))[0] == 200
                prompt = engine.requests[-1].prompt_token_ids
                num_bos[path, added] = [token == BOS for token in prompt[:2]].count(True)
    written = num_bos["chat/completions", False]
    assert num_bos == {
        ("completions", None): 1,
        ("completions", True): 1,
        ("completions", False): 0,
        ("chat/completions", None): written,
        ("chat/completions", True): written + 1,
        ("chat/completions", False): written,
    }


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("tokenize", {"messages": []}, "prompt"),
        ("tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_malformed_fields_are_refused_by_name(
    directory: Path, session: aiohttp.ClientSession, path: str, body: Any, param: str
) -> None:
    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        status, answer = await asked(session, f"{url}/{path}", body)
    assert status in (400, 404)
    assert answer["error"]["param"] == param


async def test_the_version_and_one_model(directory: Path, session: aiohttp.ClientSession) -> None:
    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        async with session.get(f"{url}/version") as response:
            assert await response.json() == {"version": __version__}
        async with session.get(f"{url}/v1/models/fake") as response:
            assert (await response.json())["id"] == "fake"
        async with session.get(f"{url}/v1/models/org/other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


def chat(**fields: Any) -> ChatRequest:
    return decode_request(json.dumps(fields).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}<end m>{% endfor %}", "<assistant> b m "),
        # A template that trims leaves no space after the message, and its own text is not part of the message.
        ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end m>{% endfor %}", "<assistant>b m"),
    ],
)
def test_a_message_is_gone_on_with(tmp_path: Path, template: str, end: str) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    model = ServedModel("fake", tokenizer, 256, 258, 0)

    def text(**fields: Any) -> str:
        return tokenizer.decode(plan_chat(chat(messages=LAST, **fields), model).prompts[0])

    assert text(continue_final_message=True, add_generation_prompt=False) == f"<user>a<end m>{end}"
    assert text(continue_final_message=True) == text(continue_final_message=True, add_generation_prompt=False)
    assert text(add_generation_prompt=False).endswith("<end m>")
    with pytest.raises(RequestError, match="exclude each other"):
        text(continue_final_message=True, add_generation_prompt=True)


PARTS = [
    {"type": "text", "text": "a"},
    {"type": "refusal", "refusal": "b"},
    {"type": "output_text", "text": "c"},
    {"type": "thinking", "thinking": "d"},
]


@pytest.mark.parametrize(
    ("template", "shown", "end"),
    [
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "a\nb\nc\nd;", ""),
        (
            "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %};{% endfor %}",
            "<a><b><c><d>;",
            "<",
        ),
    ],
)
def test_parts_of_messages(tmp_path: Path, template: str, shown: str, end: str) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    model = ServedModel("fake", tokenizer, 256, 258, 0)

    def text(messages: list[Any], **fields: Any) -> str:
        return tokenizer.decode(plan_chat(chat(messages=messages, **fields), model).prompts[0])

    asked = {"role": "user", "content": PARTS}
    assert text([asked]) == shown
    assert text([asked], continue_final_message=True) == shown.rstrip(";>")
    for content in (None, "", []):
        said: dict[str, Any] = {"role": "assistant", "content": content}
        assert text([asked, said], continue_final_message=True) == shown + end


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "text"}], "content parts of type 'text' are not supported"),
        ([{"type": "refusal", "text": "a"}], "content parts of type 'refusal' are not supported"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "content parts of type 'image_url' are not supported"),
    ],
)
def test_other_parts_are_refused(directory: Path, content: Any, message: str) -> None:
    model = ServedModel("fake", Tokenizer.load(directory), 256, 258, 0)
    with pytest.raises(RequestError, match=message) as refused:
        plan_chat(chat(messages=[*LAST, {"role": "user", "content": content}]), model)
    assert refused.value.param == f"messages[{len(LAST)}].content"


def test_parts_are_bounded(directory: Path) -> None:
    """A template may loop over them, at the pace of the interpreter."""
    model = ServedModel("fake", Tokenizer.load(directory), 100_000, 258, 0)
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 4097}
    assert plan_chat(chat(messages=[message] * 3), model)
    with pytest.raises(RequestError, match="at most 16384 content parts") as refused:
        plan_chat(chat(messages=[message] * 4), model)
    assert refused.value.param == "messages"


def test_a_template_that_hides_messages_cannot_go_on(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_text("{{ messages | length }}")
    model = ServedModel("fake", Tokenizer.load(tmp_path), 256, 258, 0)
    with pytest.raises(RequestError, match="does not show the end") as refused:
        plan_chat(chat(messages=LAST, continue_final_message=True), model)
    assert refused.value.param == "continue_final_message"
