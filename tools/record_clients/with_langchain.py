"""`ChatOpenAI` of LangChain: text, streams, `with_structured_output` in its three ways, an agent's loop."""

import sys
from typing import Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

QUESTION = "What is the weather in Bern? Answer in JSON with city and degrees."


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Oslo"]
    degrees: int = Field(ge=-40, le=50)


@tool
def get_weather(city: Literal["Bern", "Oslo"]) -> str:
    """Look up the weather of a city."""
    return f'{{"city": "{city}", "degrees": 21}}'


def main(url: str) -> None:
    settings = {"model": "demo", "base_url": url, "api_key": "none", "temperature": 0, "max_tokens": 96}
    short = {**settings, "max_tokens": 16}
    print("completion:", repr(OpenAI(**short).invoke("The capital of Switzerland is")))
    model, brief = ChatOpenAI(**settings), ChatOpenAI(**short)
    print("text:", repr(brief.invoke(QUESTION).content))
    print("stream:", repr("".join(piece.content for piece in brief.stream(QUESTION))))
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Weather, method=method).invoke(QUESTION)
        assert isinstance(found, Weather), found
        print(f"{method}:", found)
    try:
        raw = brief.with_structured_output(Weather, method="json_mode", include_raw=True).invoke(QUESTION)
        print("json_mode:", repr(raw["raw"].content))
    except openai.LengthFinishReasonError:
        # No schema ends this object: a small model goes on.
        print("json_mode: cut off by max_tokens")
    messages = [HumanMessage(QUESTION)]
    for bound in (
        model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False),
        brief.bind_tools([get_weather]),
    ):
        messages.append(bound.invoke(messages))
        print("agent:", messages[-1].content, messages[-1].tool_calls)
        for call in messages[-1].tool_calls:
            messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    assert isinstance(messages[2], ToolMessage)
    pieces = list(model.bind_tools([get_weather], tool_choice="get_weather").stream(QUESTION))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.tool_calls[0]["name"] == "get_weather"
    print("streamed call:", whole.tool_calls)


main(sys.argv[1])
