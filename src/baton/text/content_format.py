"""How a chat template reads the content of messages: one string, or a list of parts.

The rule is vLLM's (`vllm/renderers/hf.py:_detect_content_format`, 0.32): a template that loops over a message's content
gets `[{"type": "text", "text": ...}]`; any other gets a string, the parts joined by newlines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jinja2 import nodes

from baton.errors import RequestError

ContentFormat = Literal["string", "openai"]
ContentFormatOption = Literal["auto", "string", "openai"]


def detect_content_format(template: nodes.Template) -> ContentFormat:
    """ "openai" if a template loops over a message's content, directly or in a macro that gets it."""
    try:
        return "openai" if any(_loops_over_content(template)) else "string"
    except _UnknownTargetError:
        return "string"


def with_content(message: Mapping[str, Any], form: ContentFormat) -> dict[str, Any]:
    """Results of tools are always strings, as in vLLM.

    Raises `RequestError("messages")` for a part that is not text.
    """
    content = [] if message.get("content") is None else message["content"]
    if form == "string" and isinstance(content, str):
        return dict(message)
    if not isinstance(content, (str, list, tuple)):
        raise RequestError("the content of a message must be text or a list of parts", "messages")
    texts = [content] if isinstance(content, str) else [_text(part) for part in content]
    if form == "string" or message.get("role") == "tool":
        return {**message, "content": "\n".join(texts)}
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def content_text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise RequestError("parts of a message's content other than text are not supported", "messages")
    return text


class _UnknownTargetError(Exception):
    """Unpacking in a loop or assignment, which vLLM's rule does not follow."""


def _loops_over_content(template: nodes.Template) -> Iterator[bool]:
    loops = list(template.find_all(nodes.For))
    lists = _aliases(template, "messages")
    messages = [_target(loop.target) for loop in loops if any(_reads(loop.iter, name) for name in lists)]
    parameters: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        given = _content_parameters(template, macro, messages)
        for loop in macro.find_all(nodes.For):
            parameters.setdefault(id(loop), set()).update(given)
    for loop in loops:
        name = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        # A variable `content` counts outside of macros: templates assign it from a message's.
        known = parameters.get(id(loop), {"content"})
        if any(_reads(loop.iter, message, "content") for message in messages) or name in known:
            _target(loop.target)
            yield True


def _aliases(template: nodes.Template, variable: str) -> list[str]:
    aliases = [variable]
    for name in aliases:
        for assign in template.find_all(nodes.Assign):
            if _reads(assign.node, name) and (target := _target(assign.target)) not in aliases:
                aliases.append(target)
    return aliases


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Parameters that get a message's content in some call."""
    names = [argument.name for argument in macro.args]
    parameters: set[str] = set()
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False), *((pair.key, pair.value) for pair in call.kwargs)]
        parameters |= {
            name
            for name, value in given
            if name in names and any(_reads(value, message, "content") for message in messages)
        }
    return parameters


def _reads(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    while isinstance(node, (nodes.Filter, nodes.Test)) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            same = isinstance(node.arg, nodes.Const) and node.arg.value == key
        else:
            same = isinstance(node, nodes.Getattr) and node.attr == key
        if not same:
            return False
        assert isinstance(node, (nodes.Getitem, nodes.Getattr))
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise _UnknownTargetError
    return node.name
