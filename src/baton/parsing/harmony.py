"""`openai` and `openai_gptoss`: the channels of gpt-oss, as its chat template writes them.

An answer consists of messages `<|channel|>CHANNEL<|message|>TEXT<|end|>`, separated by `<|start|>assistant`. Channel
"analysis" is reasoning, "final" is content. A message to `functions.NAME` is a call, its text the arguments; as in
vLLM, so is one to a bare NAME that is none of OpenAI's own tools, in any channel. Other commentary is content. Source:
OpenAI's harmony response format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from baton.parsing.base import CallDelta, Content, ContentBuffer, ParsedEvent, Parser, Reasoning, split_at

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
# The prompt ends with `<|start|>assistant`, after which a header may name the recipient before the channel.
_TO = "to="
_FUNCTION = re.compile(
    r"\bto=(?:functions\.|(?!functions\.|(?:assistant|(?:python|browser|container)(?:\.[\w.:-]*)?)(?![\w.:-])))"
    r"([A-Za-z0-9_.:-]{1,256})"
)
_NAME = re.compile(r"\s*([a-z]+)")
_MAX_HEADER = 1024


class HarmonyParser:
    """Text outside of messages is content."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._content = ContentBuffer()
        self._held = ""
        self._where = "start"
        self._header = ""
        self._kind = "final"
        self._count = 0
        self._empty = True

    def push(self, text: str) -> list[ParsedEvent]:
        text, self._held = self._held + text, ""
        events: list[ParsedEvent] = []
        while text:
            if self._where == "start":
                lead = text.lstrip()
                if _TO.startswith(lead) and lead != _TO:
                    self._held = text
                    break
                self._where = "header" if lead.startswith(_TO) else "outside"
            elif self._where == "outside":
                before, found, text = split_at(text, _START, _CHANNEL)
                events += self._content.push(before)
                if not found:
                    self._held = text
                    break
                self._where, self._header = "header", found
            elif self._where == "header":
                at = text.find(_MESSAGE, 0, _MAX_HEADER)
                if at < 0 and len(text) < _MAX_HEADER:
                    self._held = text
                    break
                if at >= 0:
                    self._header += text[:at]
                    text = text[at + len(_MESSAGE) :]
                    self._begin(events)
                else:
                    events += self._content.push(self._header + text[:_MAX_HEADER])
                    self._where, self._header, text = "outside", "", text[_MAX_HEADER:]
            else:
                before, found, text = split_at(text, *_ENDS)
                self._body(before, events)
                if not found:
                    self._held = text
                    break
                self._end(events)
                if found == _START:
                    self._where, self._header = "header", found
        return events

    def _begin(self, events: list[ParsedEvent]) -> None:
        header, self._header = self._header, ""
        self._where, self._empty = "body", True
        function = _FUNCTION.search(header)
        channel = _NAME.match(header.partition(_CHANNEL)[2])
        if function is not None:
            self._kind = "call"
            self._content.call()
            events.append(CallDelta(self._count, function[1], ""))
        else:
            self._kind = "analysis" if channel is not None and channel[1] == "analysis" else "final"

    def _body(self, text: str, events: list[ParsedEvent]) -> None:
        if not text:
            return
        self._empty = False
        if self._kind == "call":
            events.append(CallDelta(self._count, None, text))
        elif self._kind == "analysis":
            events.append(Reasoning(text))
        else:
            events += self._content.push(text)

    def _end(self, events: list[ParsedEvent]) -> None:
        self._where = "outside"
        if self._kind == "call":
            if self._empty:
                events.append(CallDelta(self._count, None, "{}"))
            self._count += 1

    def finish(self) -> list[ParsedEvent]:
        events: list[ParsedEvent] = []
        held, self._held = self._held, ""
        if self._where == "body":
            self._body(held, events)
            self._end(events)
        else:
            events += self._content.push(self._header + held)
        return events + self._content.finish()


class HarmonyReasoning:
    """A `HarmonyParser` that passes content on to `rest`."""

    def __init__(self, rest: Parser) -> None:
        self._rest = rest
        self._channels = HarmonyParser({})

    def push(self, text: str) -> list[ParsedEvent]:
        return self._read(self._channels.push(text))

    def _read(self, events: list[ParsedEvent]) -> list[ParsedEvent]:
        parsed: list[ParsedEvent] = []
        for event in events:
            parsed += self._rest.push(event.text) if isinstance(event, Content) else [event]
        return parsed

    def finish(self) -> list[ParsedEvent]:
        return self._read(self._channels.finish()) + self._rest.finish()


def harmony_reasoning(rest: Parser, within: bool | None) -> Parser:
    """`HarmonyParser` needs none: it parses reasoning itself."""
    return rest if isinstance(rest, HarmonyParser) else HarmonyReasoning(rest)
