"""A response's output items, and their streaming events as in OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.openai.format import Json
from baton.openai.output import ChoiceOutput, Delta
from baton.openai.responses.tools import NO_NAMES, CalledName, custom_input
from baton.parsing import Content, ParsedEvent, Reasoning

# Prefix of the item's id, type of its only part, and name of the part's text events.
_MESSAGE = ("msg", "output_text", "output_text")
_REASONING = ("rs", "reasoning_text", "reasoning_text")


class Items:
    """Items in order; only the last grows. `output` has the ids of calls. `names`: of `names_of`."""

    def __init__(
        self,
        response_id: str,
        output: ChoiceOutput,
        returns_reasoning: bool,
        names: Mapping[str, CalledName] = NO_NAMES,
    ) -> None:
        self.items: list[Json] = []
        self._id, self._output, self._returns_reasoning = response_id, output, returns_reasoning
        self._names = names
        self._growing: object = None
        self._arguments = ""

    def push(self, delta: Delta, parsed: bool) -> Iterator[Json]:
        """Events of the parser, else of the delta's text."""
        events: list[ParsedEvent] = delta.events if parsed else [Content(delta.text)]
        for event in events:
            if isinstance(event, Content | Reasoning):
                is_returned = self._returns_reasoning or isinstance(event, Content)
                if event.text and is_returned:
                    yield from self._text(_MESSAGE if isinstance(event, Content) else _REASONING, event.text)
            else:
                yield from self._call(event.index, event.arguments)
        if delta.finish_reason is not None:
            yield from self._end("incomplete" if delta.finish_reason == "length" else "completed")

    def _text(self, kind: tuple[str, str, str], text: str) -> Iterator[Json]:
        if self._growing != kind:
            yield from self._begin_text(kind)
        _, _, event = kind
        self.items[-1]["content"][0]["text"] += text
        more: Json = {"delta": text} | ({"logprobs": []} if kind is _MESSAGE else {})
        yield {"type": f"response.{event}.delta", **self._place(), "content_index": 0, **more}

    def _begin_text(self, kind: tuple[str, str, str]) -> Iterator[Json]:
        prefix, part_type, _ = kind
        yield from self._done("completed")
        part: Json = {"type": part_type, "text": ""}
        item: Json = {"id": f"{prefix}_{self._id}_{len(self.items)}", "status": "in_progress"}
        if kind is _MESSAGE:
            part |= {"annotations": [], "logprobs": []}
            item |= {"type": "message", "role": "assistant"}
        else:
            item |= {"type": "reasoning", "summary": []}
        yield self._added(item | {"content": []})
        self.items[-1]["content"] = [part]
        self._growing = kind
        yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": dict(part)}

    def _call(self, index: int, arguments: str) -> Iterator[Json]:
        if self._growing != index:
            yield from self._done("completed")
            yield self._begin_call(index)
        item = self.items[-1]
        if item["type"] == "custom_tool_call":
            self._arguments += arguments  # a custom tool's input is sent when the arguments are complete
        elif arguments:
            item["arguments"] += arguments
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": arguments}

    def _begin_call(self, index: int) -> Json:
        call = self._output.parsed.calls[index]
        called = self._names.get(call.name) or CalledName(call.name)
        item: Json = {"call_id": call.id, "name": called.name}
        if called.namespace is not None:
            item["namespace"] = called.namespace
        if called.is_custom:
            item |= {"id": f"ctc_{self._id}_{len(self.items)}", "type": "custom_tool_call", "input": ""}
        else:
            item |= {"id": f"fc_{self._id}_{len(self.items)}", "type": "function_call", "arguments": ""}
        self._growing, self._arguments = index, ""
        return self._added(item | {"status": "in_progress"})

    def _end(self, status: str) -> Iterator[Json]:
        if not self.items:
            yield from self._begin_text(_MESSAGE)  # an empty response is an empty message
        yield from self._done(status)

    def _done(self, status: str) -> Iterator[Json]:
        if self._growing is None:
            return
        item, place = self.items[-1], self._place()
        item["status"] = status
        if item["type"] == "custom_tool_call":
            item["input"] = custom_input(self._arguments)
            if item["input"]:
                yield {"type": "response.custom_tool_call_input.delta", **place, "delta": item["input"]}
            yield {"type": "response.custom_tool_call_input.done", **place, "input": item["input"]}
        elif item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **call}
        else:
            event = _MESSAGE[2] if item["type"] == "message" else _REASONING[2]
            (part,) = item["content"]
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            yield {"type": f"response.{event}.done", **place, "content_index": 0, "text": part["text"], **more}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": part}
        self._growing = None
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": item}

    def _added(self, item: Json) -> Json:
        self.items.append(item)
        event = {"type": "response.output_item.added", "output_index": len(self.items) - 1}
        return event | {"item": dict(item)}

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
