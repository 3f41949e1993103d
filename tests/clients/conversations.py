"""Conversations of the official client with any deployment: text, schemas, tools, an agent's loop."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

# Answers can only be compared without sampling.
EXACT: dict[str, Any] = {"temperature": 0.0, "max_completion_tokens": 64}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Bern? Answer in JSON with city and degrees."}]


class Weather(BaseModel):
    """What answers must be."""

    city: Literal["Bern", "Oslo"]
    degrees: int = Field(ge=-40, le=50)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Oslo"]


TOOLS: list[Any] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Conversations:
    """Each method is a conversation with `model`, and asserts what its client relies on."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.client = client
        (served,) = client.models.list()
        self.model = served.id

    def _ask(self, **more: Any) -> Any:
        return self.client.chat.completions.create(**{"model": self.model, "messages": ASK, **EXACT, **more})

    def text(self) -> None:
        """A stream's pieces add up to the whole answer, with the same usage."""
        whole = self._ask(max_completion_tokens=16)
        *events, last = list(self._ask(max_completion_tokens=16, stream=True, stream_options={"include_usage": True}))
        assert whole.choices[0].message.content
        assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
        assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)

    def schema(self) -> None:
        form = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}
        made = self._ask(response_format={"type": "json_schema", "json_schema": form})
        assert made.choices[0].finish_reason == "stop"
        Weather.model_validate_json(made.choices[0].message.content)

    def parse(self) -> None:
        """`response_format` as a class, whole and through the client's own stream reader."""
        asked: Any = {"model": self.model, "messages": ASK, **EXACT, "response_format": Weather}
        made = self.client.chat.completions.parse(**asked)
        assert isinstance(made.choices[0].message.parsed, Weather)
        with self.client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_completion().choices[0].message.parsed == made.choices[0].message.parsed
        assert {"chunk", "content.delta", "content.done"} <= kinds

    def tools(self) -> None:
        """Required calls: any of the tools, then a certain one; parsed by the client, and streamed."""
        for choice, finish in (("required", "tool_calls"), (NAMED, "stop")):
            asked: Any = {"model": self.model, "messages": ASK, **EXACT, "tools": TOOLS, "tool_choice": choice}
            asked["parallel_tool_calls"] = False
            made = self.client.chat.completions.parse(**asked).choices[0]
            assert made.finish_reason == finish
            assert made.message.content is None
            (call,) = made.message.tool_calls
            assert call.function.name == "get_weather"
            assert isinstance(call.function.parsed_arguments, GetWeather)
            with self.client.chat.completions.stream(**asked) as stream:
                kinds = [event.type for event in stream]
                final = stream.get_final_completion().choices[0]
            assert "tool_calls.function.arguments.delta" in kinds
            assert final.finish_reason == finish
            assert final.message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments

    def agent(self) -> None:
        """Ask, run the call, send its result, get the answer."""
        messages: list[Any] = [*ASK]
        looked_up: list[str] = []
        for choice in ("required", "auto"):
            message = self._ask(messages=messages, tools=TOOLS, tool_choice=choice).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                assert call.function.name == "get_weather"
                looked_up.append(json.loads(call.function.arguments)["city"])
                content = json.dumps({"city": looked_up[-1], "degrees": 21})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        assert [message["role"] for message in messages[:3]] == ["user", "assistant", "tool"]
        assert messages[-1]["role"] == "assistant"
        assert messages[-1]["content"]
        assert looked_up


ALL = [Conversations.text, Conversations.schema, Conversations.parse, Conversations.tools, Conversations.agent]
