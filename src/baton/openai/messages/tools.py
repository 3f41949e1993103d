"""Tools of a Messages request, and changes to them within the conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from baton.errors import RequestError
from baton.openai.tools import FunctionTool, Tool

CHANGES = ("tool_addition", "tool_removal")


class AnthropicTool(msgspec.Struct, kw_only=True):
    """One of `tools`. Only those with an `input_schema`, which the client runs, are supported. `defer_loading`: chat
    templates may hide it until the client adds it."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChange(msgspec.Struct, kw_only=True):
    """`name`: one of `tools`."""

    type: Literal["tool_reference", "tool_definition"]
    name: str | None = None
    definition: AnthropicTool | None = None


class _Block(Protocol):
    type: str
    tool: ToolChange | None


def tools_in_effect(declared: Sequence[AnthropicTool], changes: Iterable[tuple[str, _Block]]) -> list[Tool]:
    """The tools after all changes (with their blocks' names). As in vLLM 0.32, a chat template gets one list.

    Raises `RequestError` with the block's name.
    """
    tools = {tool.name: (f"tools[{index}]", tool) for index, tool in enumerate(declared)}
    if len(tools) < len(declared):  # the chat's check names the second duplicate
        return [_tool(f"tools[{index}]", tool) for index, tool in enumerate(declared)]
    removed: set[str] = set()
    for field, block in changes:
        change, adds = block.tool, block.type == "tool_addition"
        defined = None if change is None else change.definition
        name = None if change is None else change.name if defined is None else defined.name
        if name is None or (defined is not None and not adds):
            what = "a tool_reference with a name" + (" or a tool_definition" if adds else "")
            raise RequestError(f"{field}.tool must be {what}", f"{field}.tool")
        if defined is not None:
            tools[name] = f"{field}.tool.definition", defined
        elif name not in tools:
            raise RequestError(f"{field}.tool.name is not in tools", f"{field}.tool.name")
        elif adds:
            tools[name] = tools[name][0], msgspec.structs.replace(tools[name][1], defer_loading=None)
        removed = removed - {name} if adds else removed | {name}
    return [_tool(field, tool) for name, (field, tool) in tools.items() if name not in removed]


def _tool(field: str, tool: AnthropicTool) -> Tool:
    if tool.type not in (None, "custom"):
        what = f"tools of type {tool.type!r} are not supported, only those with an input_schema"
        raise RequestError(f"{field}: {what}", f"{field}.type")
    if tool.input_schema is None:
        raise RequestError(f"{field}.input_schema is needed", f"{field}.input_schema")
    return Tool(
        function=FunctionTool(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
            defer_loading=tool.defer_loading,
        )
    )
