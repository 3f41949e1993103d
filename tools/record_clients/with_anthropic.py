"""Anthropic's client, as coding agents use it: text, streams, tools, an agent's loop, and token counting."""

import json
import sys

import anthropic

QUESTION = [{"role": "user", "content": "What is the weather in Bern?"}]
TOOL = {
    "name": "get_weather",
    "description": "Look up the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bern", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
# As Claude Code does: blocks, each of which may be cached.
SYSTEM = [
    {"type": "text", "text": "You are a coding agent."},
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
]


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    # The client no longer has a parameter for it, as the newest of Anthropic's models take none.
    exact = {"extra_body": {"temperature": 0}}
    short = {"model": "demo", "max_tokens": 16, **exact}
    asked = {"model": "demo", "max_tokens": 64, "system": SYSTEM, "tools": [TOOL], **exact}
    made = client.messages.create(messages=QUESTION, stop_sequences=["\n\n\n"], **short)
    print("text:", made.content, made.stop_reason, made.usage)
    with client.messages.stream(messages=QUESTION, metadata={"user_id": "someone"}, **short) as stream:
        print("stream:", repr("".join(stream.text_stream)), stream.get_final_message().stop_reason)
    counted = client.messages.count_tokens(model="demo", messages=QUESTION, system=SYSTEM, tools=[TOOL])
    print("count:", counted.input_tokens)
    messages = [*QUESTION]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "auto"}):
        with client.messages.stream(messages=messages, tool_choice=choice, **asked) as stream:
            kinds = {event.type for event in stream}
            made = stream.get_final_message()
        assert {"message_start", "content_block_start", "content_block_stop", "message_stop"} <= kinds, kinds
        print("agent:", made.content, made.stop_reason)
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in made.content]}
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": json.dumps({**block.input, "degrees": 21})}
            for block in made.content
            if block.type == "tool_use"
        ]
        if results:
            messages.append({"role": "user", "content": results})
    assert messages[2]["content"][0]["type"] == "tool_result"
    named = client.messages.create(messages=QUESTION, tool_choice={"type": "tool", "name": "get_weather"}, **asked)
    assert named.content[-1].input["city"] in ("Bern", "Oslo")
    try:
        client.messages.create(model="claude-other", max_tokens=4, messages=QUESTION)
    except anthropic.NotFoundError as error:
        print("refused:", error.body)


main(sys.argv[1])
