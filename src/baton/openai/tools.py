"""Tools of a chat: checks, the grammar of a required call, and the response's parser. The client runs the tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from baton.errors import ConfigError, RequestError
from baton.parsing import REASONING_PARSERS, TOOL_PARSERS, Parser
from baton.parsing.forced import NamedParser, PlainParser, RequiredParser
from baton.sampling_params import StructuredOutputsParams

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_AUTO = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


class FunctionTool(msgspec.Struct, kw_only=True):
    """`parameters`: a JSON schema, enforced only if a call is required. `defer_loading`: for templates."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: FunctionTool
    type: Literal["function"] = "function"
    defer_loading: bool | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class NamedChoice(msgspec.Struct, kw_only=True):
    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function called in an earlier response. `arguments`: an object, or its JSON."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"

    def for_template(self) -> dict[str, Any]:
        """The call for a template, with `arguments` as an object. As in vLLM, invalid arguments, which the model wrote,
        count as empty."""
        arguments = self.function.arguments or {}
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                arguments = {}
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or "", "type": self.type, "function": function}


@dataclass(frozen=True, slots=True)
class Parsing:
    """How responses are parsed, by vLLM's flags. Raises `ConfigError` for an unknown parser."""

    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        for field, names in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            name = getattr(self, field)
            if name is not None and name not in names:
                raise ConfigError(field, f"{name!r} is unknown, expected one of {', '.join(names)}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("tool_call_parser", "is needed with enable_auto_tool_choice")


NO_PARSING = Parsing()


@dataclass(frozen=True, slots=True)
class CheckedTools:
    """`choice` is "none" without tools."""

    tools: Sequence[Tool]
    choice: ToolChoice
    parallel: bool

    @classmethod
    def of(cls, tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> CheckedTools:
        """Raises `RequestError` with the field's name."""
        tools = tools or ()
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"tools must be at most {MAX_TOOLS}", "tools")
        names = [tool.function.name for tool in tools]
        for index, name in enumerate(names):
            if not _NAME.fullmatch(name) or names.index(name) < index:
                what = "1 to 256 of A-Z a-z 0-9 _ . : -, and used once"
                raise RequestError(f"tools[{index}].function.name must be {what}", f"tools[{index}].function.name")
        if not tools and (choice == "required" or isinstance(choice, NamedChoice)):
            raise RequestError("tool_choice needs tools", "tool_choice")
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise RequestError("tool_choice names a function that is not in tools", "tool_choice")
        default: ToolChoice = "auto" if tools else "none"
        return cls(tools, (choice or default) if tools else "none", parallel is not False)

    def for_template(self) -> list[dict[str, Any]] | None:
        return [_for_template(tool) for tool in self.tools] or None

    def grammar(self) -> StructuredOutputsParams | None:
        """The grammar of a required call: as in vLLM, a list of `{"name", "parameters"}`, or the named function's
        arguments. Raises `RequestError` with the field's name."""
        if isinstance(self.choice, NamedChoice):
            wanted = self.choice.function.name
            schema = next(_parameters(tool) for tool in self.tools if tool.function.name == wanted)
        elif self.choice == "required":
            schema = _calls(self.tools, self.parallel)
        else:
            return None
        try:
            params = StructuredOutputsParams(json=msgspec.json.encode(schema).decode())
            params.check()
        except RequestError as error:
            raise RequestError(f"tools: {error}", "tools") from None
        return params

    def reader(self, parsing: Parsing, reasons: bool | None, constrained: bool) -> Callable[[], Parser] | None:
        """None: all text is content. `constrained`: a grammar applies from the first token, so there is no reasoning.

        Raises `RequestError` with the field's name.
        """
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools}
        make: Callable[[], Parser] | None = None
        if isinstance(self.choice, NamedChoice):
            name = self.choice.function.name
            return lambda: NamedParser(name)
        if self.choice == "required":
            return RequiredParser
        if self.choice == "auto":
            if not parsing.enable_auto_tool_choice or parsing.tool_call_parser is None:
                raise RequestError(_AUTO, "tool_choice")
            form = TOOL_PARSERS[parsing.tool_call_parser]

            def make() -> Parser:
                return form.make(schemas)

        if parsing.reasoning_parser is None or constrained:
            return make
        form_of_reasoning, rest = REASONING_PARSERS[parsing.reasoning_parser], make or PlainParser
        return lambda: form_of_reasoning.make(rest(), reasons)

    def markers(self, parsing: Parsing, constrained: bool) -> tuple[str, ...]:
        """Texts that parsers need even if they are special tokens."""
        name, reasons = parsing.tool_call_parser, parsing.reasoning_parser
        calls = TOOL_PARSERS[name].markers if self.choice == "auto" and name is not None else ()
        return calls + (REASONING_PARSERS[reasons].markers if reasons is not None and not constrained else ())


NO_TOOLS = CheckedTools((), "none", True)


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or _NO_PARAMETERS


def _calls(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """`$defs` move to the root, where references look for them."""
    definitions: dict[str, Any] = {}
    items = []
    for index, tool in enumerate(tools):
        parameters = dict(_parameters(tool))
        own = parameters.pop("$defs", {})
        for name, defined in own.items() if isinstance(own, dict) else ():
            if definitions.setdefault(name, defined) != defined:
                field = f"tools[{index}].function.parameters"
                raise RequestError(f"{field}: $defs has another {name!r} than a tool before it", field)
        properties = {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": parameters}
        items.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def _for_template(tool: Tool) -> dict[str, Any]:
    """A tool without unset fields, in OpenAI's order, as templates show it. The schema is unchanged: it may contain
    null as a default."""
    function = msgspec.structs.asdict(tool.function)
    if function["defer_loading"] is None:  # as in vLLM
        function["defer_loading"] = tool.defer_loading
    shown: dict[str, Any] = {"type": tool.type}
    shown["function"] = {name: value for name, value in function.items() if value is not None}
    return shown if tool.defer_loading is None else {**shown, "defer_loading": tool.defer_loading}
