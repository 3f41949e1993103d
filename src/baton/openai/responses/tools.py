"""Tools of a response as functions of a chat.

As in vLLM 0.32, a custom tool is a function of one string, and a function of a namespace is named `NAMESPACE__NAME`.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from baton.errors import RequestError
from baton.openai.tools import FunctionName, FunctionTool, NamedChoice, Tool, ToolChoice

log = logging.getLogger(__name__)

_FUNCTION, _CUSTOM, _NAMESPACE = "function", "custom", "namespace"
# Run by OpenAI or its clients; not shown to the model.
_RUN_ELSEWHERE = frozenset(
    (
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation"),
        *("local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search"),
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    )
)
_INPUT = "input"
_CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [_INPUT],
    "additionalProperties": False,
}


class ResponseTool(msgspec.Struct, kw_only=True):
    """`tools`: of a namespace. `format`: of a custom tool's input; only text is supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[ResponseTool] | None = None

    def echo(self) -> dict[str, Any]:
        """The tool as in the request, with the fields that OpenAI's type needs."""
        needed = ("parameters", "strict") if self.type == _FUNCTION else ()
        fields = msgspec.structs.asdict(self)
        echoed = {name: value for name, value in fields.items() if value is not None or name in needed}
        return echoed | ({"tools": [tool.echo() for tool in self.tools]} if self.tools else {})


class ChosenTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class CalledName:
    """A tool as the client named it; `flat`: its name in the chat."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def flat(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


NO_NAMES: Mapping[str, CalledName] = MappingProxyType({})


def shown_tools(tools: Sequence[ResponseTool]) -> list[Tool]:
    """Raises `RequestError` with the field's name."""
    return [_tool(tool, called) for tool, called in _functions(tools)]


def names_of(tools: Sequence[ResponseTool]) -> dict[str, CalledName]:
    """Custom tools and functions of namespaces, by their names in a chat."""
    return {called.flat: called for _, called in _functions(tools) if called.is_custom or called.namespace}


def chosen_tool(choice: ChosenTool, tools: Sequence[ResponseTool]) -> ToolChoice:
    """A function of a namespace may be chosen by its own name if that is unique."""
    if choice.type not in (_FUNCTION, _CUSTOM) or choice.name is None:
        raise RequestError("tool_choice: only functions and custom tools can be chosen, by their name", "tool_choice")
    called = [called for _, called in _functions(tools)]
    name = choice.name
    if all(name != one.flat for one in called):
        local = [one.flat for one in called if one.name == name]
        if len(local) > 1:
            what = f"is in several namespaces: choose one of {', '.join(local)}"
            raise RequestError(f"tool_choice: {name!r} {what}", "tool_choice")
        name = local[0] if local else name
    return NamedChoice(function=FunctionName(name=name))


def custom_arguments(text: str) -> str:
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The tool's input; arguments in another form are the input itself."""
    try:
        value = json.loads(arguments)
        text = value.get(_INPUT) if isinstance(value, dict) else None
        if isinstance(text, str):
            text.encode()  # half a surrogate pair is not text
            return text
    except (ValueError, RecursionError):
        pass
    return arguments


def _functions(
    tools: Sequence[ResponseTool], field: str = "tools", namespace: str | None = None
) -> Iterator[tuple[ResponseTool, CalledName]]:
    for index, tool in enumerate(tools):
        name = f"{field}[{index}]"
        if tool.type in _RUN_ELSEWHERE and namespace is None:
            _tell_once(tool.type)
            continue
        is_group = tool.type == _NAMESPACE and namespace is None
        if tool.type not in (_FUNCTION, _CUSTOM) and not is_group:
            raise RequestError(f"{name}: tools of type {tool.type!r} are not supported", f"{name}.type")
        if tool.name is None:
            raise RequestError(f"{name}.name is needed", f"{name}.name")
        if is_group:
            yield from _functions(tool.tools or (), f"{name}.tools", tool.name)
            continue
        is_custom = tool.type == _CUSTOM
        if is_custom and (tool.format or {}).get("type", "text") != "text":
            raise RequestError(f"{name}.format: the input of custom tools follows no grammar here", f"{name}.format")
        yield tool, CalledName(tool.name, namespace, is_custom)


@functools.cache
def _tell_once(kind: str) -> None:
    log.info("tools of type %s run at OpenAI: the model is not shown them", kind)


def _tool(tool: ResponseTool, called: CalledName) -> Tool:
    return Tool(
        function=FunctionTool(
            name=called.flat,
            description=tool.description,
            parameters=_CUSTOM_PARAMETERS if called.is_custom else tool.parameters,
            strict=tool.strict,
            defer_loading=tool.defer_loading,
        )
    )
