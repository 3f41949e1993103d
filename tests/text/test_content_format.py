"""A chat template gets the content of messages as it reads it, a string or a list of parts, by vLLM's rule."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from baton.errors import RequestError
from baton.text import Tokenizer
from testkit.servers.fake_serving import write_tokenizer

ALL = "{% for message in messages %}"
END = "{% endfor %}"
PARTS = "{% for item in message['content'] %}{% if item.type == 'text' %}<{{ item.text }}>{% endif %}{% endfor %}"
# The answers of vLLM 0.32's `_detect_content_format`.
STRINGS = {
    "chatml": f"{ALL}{{{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}}}{END}",
    "filtered": f"{ALL}{{{{ message.content | trim }}}}{END}",
    "tool calls": f"{ALL}{{{{ message.content }}}}{{% for call in message.tool_calls %}}x{{% endfor %}}{END}",
    "lines": f"{ALL}{{% for line in message.content.split('\\n') %}}{{{{ line }}}}|{{% endfor %}}{END}",
    "tests for a string": f"{ALL}{{% if message.content is string %}}{{{{ message.content }}}}{{% endif %}}{END}",
    "a macro that loops over something else": (
        "{% macro show(content) %}{% for item in content %}{{ item }}{% endfor %}{% endmacro %}"
        f"{ALL}{{{{ show(['a', 'b']) }}}}{{{{ message.content }}}}{END}"
    ),
    "another loop": f"{{% for x in [1, 2] %}}{{{{ x }}}}{{% endfor %}}{ALL}{{{{ message.content }}}}{END}",
    "names that are each other's": (
        "{% set others = messages %}{% set messages = others %}"
        "{% for message in others %}{{ message.content }}{% endfor %}"
    ),
}
LISTS = {
    "subscript": f"{ALL}{PARTS}{END}",
    "attribute": f"{ALL}{{% for item in message.content %}}[{{{{ item['text'] }}}}]{{% endfor %}}{END}",
    "string or list": (
        f"{ALL}{{{{ message.role }}}}:{{% if message['content'] is string %}}{{{{ message['content'] }}}}"
        f"{{% else %}}{PARTS}{{% endif %}}{END}"
    ),
    "sliced": f"{{% set rest = messages[1:] %}}{{% for message in rest %}}{PARTS}{END}",
    "aliases": "{% set a = messages %}{% set b = a | list %}{% for m in b[::-1] %}"
    "{% for item in m.content | list %}<{{ item.text }}>{% endfor %}{% endfor %}",
    "filtered messages": f"{{% for message in messages | rejectattr('role', 'equalto', 'system') %}}{PARTS}{END}",
    "a variable": f"{ALL}{{% set content = message['content'] %}}"
    f"{{% for item in content %}}({{{{ item.text }}}}){{% endfor %}}{END}",
    "a macro": (
        "{% macro render_content(content, count) %}{% if content is string %}{{ content }}{% else %}"
        "{% for item in content %}{{ item.text }},{% endfor %}{% endif %}{% endmacro %}"
        f"{ALL}{{{{ render_content(message.content, true) }}}}{END}"
    ),
    "a macro by keyword": (
        "{% macro show(role, body) %}{{ role }}{% for item in body %}{{ item.text }},{% endfor %}{% endmacro %}"
        f"{ALL}{{{{ show(message.role, body=message['content']) }}}}{END}"
    ),
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "one é"}, {"type": "text", "text": ""}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
    {"role": "user", "content": ""},
]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


AS_STRINGS = ["Be brief.", "one é\n", "", "two\nthree", ""]
AS_LISTS: list[Any] = [parts("Be brief."), parts("one é", ""), [], "two\nthree", parts("")]


def model_with(directory: Path, template: str) -> Path:
    path = write_tokenizer(directory) / "tokenizer_config.json"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": template}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return directory


def as_transformers(directory: Path, contents: list[Any]) -> str:
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    chat = [{**message, "content": content} for message, content in zip(CHAT, contents, strict=True)]
    return str(theirs.apply_chat_template(chat, tokenize=False))


@pytest.mark.parametrize("template", STRINGS.values(), ids=STRINGS)
def test_templates_of_strings(tmp_path: Path, template: str) -> None:
    directory = model_with(tmp_path, template)
    assert Tokenizer.load(directory).apply_chat_template(CHAT, False) == as_transformers(directory, AS_STRINGS)


@pytest.mark.parametrize("template", LISTS.values(), ids=LISTS)
def test_templates_of_lists(tmp_path: Path, template: str) -> None:
    directory = model_with(tmp_path, template)
    shown = Tokenizer.load(directory).apply_chat_template(CHAT, False)
    assert shown == as_transformers(directory, AS_LISTS)
    assert "one é" in shown


def test_a_loop_that_unpacks_parts_is_not_followed(tmp_path: Path) -> None:
    template = f"{ALL}{{% for name, text in message.content %}}{{{{ name }}}}{{% endfor %}}{END}"
    chat = [{"role": "user", "content": ""}]
    assert Tokenizer.load(model_with(tmp_path, template)).apply_chat_template(chat) == ""


def test_a_given_format_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = f"{ALL}{{{{ message.content | tojson }}}}{END}"
    directory, chat = model_with(tmp_path, template), [{"role": "user", "content": "a"}]
    with caplog.at_level(logging.WARNING, "baton.text.template"):
        given = Tokenizer.load(directory, chat_template_content_format="openai")
        assert given.apply_chat_template(chat) == '[{"type": "text", "text": "a"}]'
        assert "chat_template_content_format is openai, but the chat template seems to read string" in caplog.text
        caplog.clear()
        for same in ("auto", "string"):
            loaded = Tokenizer.load(directory, chat_template_content_format=same)  # type: ignore[arg-type]
            assert loaded.apply_chat_template(chat) == '"a"'
    assert not caplog.records


def test_developers_messages_are_parts_too(tmp_path: Path) -> None:
    directory = model_with(tmp_path, f"{ALL}{{{{ message.role }}}}{PARTS}{END}")
    chat = [{"role": "developer", "content": parts("a", "b")}, {"role": "user", "content": "c"}]
    chat.append({"role": "system", "content": "d"})
    assert Tokenizer.load(directory).apply_chat_template(chat) == "system<a\nb\n\nd>user<c>"


@pytest.mark.parametrize("content", [5, [{"type": "image_url", "image_url": {"url": "x"}}], [5], {"type": "text"}])
def test_other_contents_are_refused(tmp_path: Path, content: Any) -> None:
    tokenizer = Tokenizer.load(model_with(tmp_path, STRINGS["chatml"]))
    with pytest.raises(RequestError, match="content") as refused:
        tokenizer.apply_chat_template([{"role": "user", "content": content}])
    assert refused.value.param == "messages"
