"""Parsers of tool calls and reasoning, with vLLM's names."""

from baton.parsing.base import CallDelta, Content, ParsedEvent, Parser, Reasoning
from baton.parsing.registry import REASONING_PARSERS, TOOL_PARSERS, ToolFormat

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "CallDelta",
    "Content",
    "ParsedEvent",
    "Parser",
    "Reasoning",
    "ToolFormat",
]
