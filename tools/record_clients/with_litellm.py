"""LiteLLM: text, streams, a class as `response_format`, tools."""

import json
import os
import sys
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches prices

import litellm
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "What is the weather in Bern? Answer in JSON with city and degrees."}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Oslo"]
    degrees: int = Field(ge=-40, le=50)


TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": Weather.model_json_schema()},
}


def main(url: str) -> None:
    asked = {"model": "openai/demo", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 96}
    short = {**asked, "max_tokens": 16}
    made = litellm.text_completion(**{**short, "model": "text-completion-openai/demo"}, prompt="Bern is")
    print("completion:", repr(made.choices[0].text))
    print("text:", repr(litellm.completion(messages=MESSAGES, **short).choices[0].message.content))
    stream = litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **short)
    print("stream:", repr("".join(piece.choices[0].delta.content or "" for piece in stream if piece.choices)))
    made = litellm.completion(messages=MESSAGES, response_format=Weather, **asked)
    print("schema:", Weather.model_validate_json(made.choices[0].message.content))
    messages = [*MESSAGES]
    for choice, limits in (("required", asked), ("auto", short)):
        made = litellm.completion(messages=messages, tools=[TOOL], tool_choice=choice, **limits)
        message = made.choices[0].message
        print("agent:", message.content, message.tool_calls)
        messages.append(message.model_dump())
        for call in message.tool_calls or []:
            Weather.model_validate_json(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21})})
    assert messages[2]["role"] == "tool"


main(sys.argv[1])
