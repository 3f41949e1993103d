"""A message's content blocks, and their streaming events as in Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from baton.openai.format import Json
from baton.openai.output import ChoiceOutput, Delta
from baton.parsing import Content, ParsedEvent, Reasoning


class Blocks:
    """The blocks in order; only the last grows. `output` has the ids of calls. `signature`: of thinking blocks, a
    placeholder."""

    def __init__(self, output: ChoiceOutput, signature: str) -> None:
        self.blocks: list[Json] = []
        self._output, self._signature = output, signature
        self._growing: object = None
        self._arguments = ""

    def push(self, delta: Delta, parsed: bool) -> Iterator[Json]:
        """Events of the parser, else of the delta's text."""
        events: list[ParsedEvent] = delta.events if parsed else [Content(delta.text)]
        for event in events:
            if isinstance(event, Content | Reasoning):
                if event.text:
                    yield from self._text("text" if isinstance(event, Content) else "thinking", event.text)
            else:
                yield from self._call(event.index, event.arguments)
        if delta.finish_reason is not None:
            if not self.blocks:
                yield self._start({"type": "text", "text": ""})  # clients expect a block
            yield from self._stop()

    def stop_reason(self) -> tuple[str | None, str | None]:
        output = self._output
        if output.finish_reason == "length":
            return "max_tokens", None
        calls = output.parsed.calls
        # A stop string may have cut off the last call.
        if isinstance(output.stop_reason, str) and not (calls and _object(calls[-1].arguments) is not None):
            return "stop_sequence", output.stop_reason
        return ("tool_use" if calls else "end_turn"), None

    def _text(self, kind: str, text: str) -> Iterator[Json]:
        if self._growing != kind:
            yield from self._stop()
            yield self._start({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
            self._growing = kind
        self.blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, index: int, arguments: str) -> Iterator[Json]:
        if self._growing != index:
            yield from self._stop()
            call = self._output.parsed.calls[index]
            yield self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            self._growing, self._arguments = index, ""
        if arguments:
            self._arguments += arguments
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _stop(self) -> Iterator[Json]:
        if self._growing is None:
            return
        block = self.blocks[-1]
        if self._growing == "thinking":
            block["signature"] = self._signature
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        elif block["type"] == "tool_use":
            # Truncated arguments are not valid JSON.
            block["input"] = _object(self._arguments) or {}
        self._growing = None
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _start(self, block: Json) -> Json:
        self.blocks.append(block)
        self._growing = block["type"]
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _object(arguments: str) -> dict[str, Any] | None:
    """Numbers have the precision of Python's JSON."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
