"""Parsers of tool calls and reasoning, by the names that vLLM gives them."""

from baton.parsing.base import CallDelta, Content, Event, Parser, Reasoning
from baton.parsing.registry import REASONING_PARSERS, TOOL_PARSERS, ToolFormat

__all__ = ["REASONING_PARSERS", "TOOL_PARSERS", "CallDelta", "Content", "Event", "Parser", "Reasoning", "ToolFormat"]
