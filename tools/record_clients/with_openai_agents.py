"""openai-agents: an agent with a tool, by chat completions and by responses, at once and streamed."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Oslo"]
    degrees: int


@function_tool
def get_weather(city: Literal["Bern", "Oslo"]) -> str:
    """Look up the weather of a city."""
    return f'{{"city": "{city}", "degrees": 21}}'


QUESTION = "What is the weather in Bern?"


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="demo", openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=64)
        plain = Agent(name="plain", instructions="Be brief.", model=model, model_settings=settings)
        print(kind.__name__, "text:", repr((await Runner.run(plain, QUESTION)).final_output))
        streamed = Runner.run_streamed(plain, QUESTION)
        num_events = len([event async for event in streamed.stream_events()])
        print("stream:", num_events, repr(streamed.final_output))
        required = ModelSettings(temperature=0, max_tokens=64, tool_choice="required", parallel_tool_calls=False)
        # After the call the agent resets its tool_choice, so that it may answer.
        agent = Agent(
            name="weather", instructions="Use tools.", model=model, model_settings=required, tools=[get_weather]
        )
        print("agent:", repr((await Runner.run(agent, QUESTION, max_turns=3)).final_output))
        typed = Agent(name="typed", model=model, model_settings=settings, output_type=Weather)
        print("typed:", (await Runner.run(typed, QUESTION)).final_output)


asyncio.run(main(sys.argv[1]))
