"""Parsers by name. A new parser needs a file, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.parsing.base import Parser
from baton.parsing.harmony import HarmonyParser, harmony_reasoning
from baton.parsing.hermes import HermesParser
from baton.parsing.llama3_json import Llama3JsonParser
from baton.parsing.mistral import MistralParser
from baton.parsing.qwen3_xml import Qwen3XmlParser
from baton.parsing.reasoning import ThinkParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`make` gets the JSON schema of each tool's parameters. `markers`: the parser must see them even if they are
    special tokens; others stay hidden."""

    make: Callable[[Mapping[str, Any]], Parser]
    markers: tuple[str, ...]


_TAGS = ("<tool_call>", "</tool_call>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_THINK = ("<think>", "</think>")
TOOL_PARSERS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(HermesParser, _TAGS),
    "llama3_json": ToolFormat(Llama3JsonParser, ("<|python_tag|>",)),
    "mistral": ToolFormat(MistralParser, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    "openai": ToolFormat(HarmonyParser, _HARMONY),
    "qwen3_xml": ToolFormat(Qwen3XmlParser, _TAGS),
}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`make` gets the parser of the answer after it, and whether the prompt ends within the reasoning or after it;
    None: neither. `markers`: as in `ToolFormat`."""

    make: Callable[[Parser, bool | None], Parser]
    markers: tuple[str, ...]


REASONING_PARSERS: dict[str, ReasoningFormat] = {
    # The template writes `<think>`, or the model leaves it out.
    "deepseek_r1": ReasoningFormat(lambda rest, within: ThinkParser(rest, within is not False), _THINK),
    "openai_gptoss": ReasoningFormat(harmony_reasoning, _HARMONY),
    "qwen3": ReasoningFormat(lambda rest, within: ThinkParser(rest, bool(within), to_call=True), _THINK),
}
