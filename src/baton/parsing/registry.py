"""The parsers by name. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.parsing.base import Parser
from baton.parsing.harmony import HarmonyParser, reasoning
from baton.parsing.hermes import HermesParser
from baton.parsing.llama3_json import Llama3JsonParser
from baton.parsing.mistral import MistralParser
from baton.parsing.qwen3_xml import Qwen3XmlParser
from baton.parsing.reasoning import ThinkParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. `make` gets the JSON schema of each tool's parameters. `special`: its markers are
    special tokens, which must be spelt."""

    make: Callable[[Mapping[str, Any]], Parser]
    special: bool = False


TOOL_PARSERS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(HermesParser, special=True),  # with some models they are
    "llama3_json": ToolFormat(Llama3JsonParser, special=True),
    "mistral": ToolFormat(MistralParser, special=True),
    "openai": ToolFormat(HarmonyParser, special=True),
    "qwen3_xml": ToolFormat(Qwen3XmlParser),
}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning. `make` gets what reads the answer behind it, and whether the prompt ends inside
    of it. `special`: its markers are special tokens, which must be spelt."""

    make: Callable[[Parser, bool], Parser]
    special: bool = False


REASONING_PARSERS: dict[str, ReasoningFormat] = {
    # Its templates open the reasoning, or the model leaves the opening out.
    "deepseek_r1": ReasoningFormat(lambda rest, opened: ThinkParser(rest, True)),
    "openai_gptoss": ReasoningFormat(reasoning, special=True),
    "qwen3": ReasoningFormat(ThinkParser),
}
