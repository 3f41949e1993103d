"""Recorded requests of other clients, sent byte for byte, and checks of the answers.

`tools/record_clients` ran these clients against `deployments`, and recorded their requests.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.openai.test_messages import events_of
from tests.openai.test_messages import joined as joined_message

RECORDED = Path(__file__).with_name("recorded")
CLIENTS = {path.stem: json.loads(path.read_text())["requests"] for path in sorted(RECORDED.glob("*.json"))}


def replay(url: str, path: str, body: str) -> None:
    asked = json.loads(body)
    sent = urllib.request.Request(url + path, body.encode(), {"Content-Type": "application/json"})
    if asked["model"] != "demo":
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(sent, timeout=60)
        return
    with urllib.request.urlopen(sent, timeout=60) as reply:
        text = reply.read().decode()
    if path.startswith("/v1/messages"):
        check_message(path, asked, text)
    elif path == "/v1/responses":
        check_response(asked, text)
    else:
        check(asked, joined(text, asked) if asked.get("stream") else json.loads(text)["choices"][0])


def joined(text: str, body: dict[str, Any]) -> dict[str, Any]:
    """The choice that the events of a stream add up to."""
    *lines, end, nothing = text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    if (body.get("stream_options") or {}).get("include_usage"):
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] > 0
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons.count(None) == len(reasons) - 1
    if (body.get("stream_options") or {}).get("continuous_usage_stats"):
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == last["usage"]["completion_tokens"]
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(message["tool_calls"]):
                assert call["id"]
                message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"text": message["content"], "message": message, "finish_reason": reasons[-1]}


def check(body: dict[str, Any], choice: dict[str, Any]) -> None:
    """Check that the answer has the requested kind: words, JSON, JSON of a schema, or calls of its tools."""
    if "prompt" in body:
        assert choice["text"]
        return
    message, form, wanted = choice["message"], body.get("response_format") or {}, body.get("tool_choice")
    calls = message.get("tool_calls") or []
    if form.get("type") == "json_schema":
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(message["content"]), form["json_schema"]["schema"])
    elif form:
        # It may be truncated: no schema says when it ends.
        assert message["content"].lstrip().startswith("{")
    elif wanted in (None, "auto", "none"):
        assert message["content"] or calls
    else:
        assert calls
        assert not message["content"]
        # A schema that allows additional properties, like LangChain's, lets a small model go on up to its limit.
        assert choice["finish_reason"] in ("tool_calls", "stop", "length")
    if choice["finish_reason"] == "length":
        calls = calls[:-1]  # the last was truncated
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body.get("tools", [])}
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
        assert not isinstance(wanted, dict) or wanted["function"]["name"] == call["function"]["name"]


def check_message(path: str, body: dict[str, Any], text: str) -> None:
    """Check an answer of Anthropic's API against the tools that it must or may call."""
    if path.endswith("/count_tokens"):
        assert json.loads(text)["input_tokens"] > 0
        return
    message = joined_message(events_of(text)) if body.get("stream") else json.loads(text)
    assert message["usage"]["output_tokens"] > 0
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    if (body.get("tool_choice") or {}).get("type") in ("any", "tool"):
        assert calls
    if message["stop_reason"] != "max_tokens":
        schemas = {tool["name"]: tool["input_schema"] for tool in body.get("tools", [])}
        for call in calls:
            jsonschema.validate(call["input"], schemas[call["name"]])


def check_response(body: dict[str, Any], text: str) -> None:
    """Check an answer of OpenAI's Responses API: the text's format, or calls of its tools."""
    whole = events_of(text)[-1]["response"] if body.get("stream") else json.loads(text)
    assert whole["status"] in ("completed", "incomplete")
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    if body.get("tool_choice") == "required":
        assert calls
    elif "text" in body and whole["status"] == "completed":
        (item,) = whole["output"]
        jsonschema.validate(json.loads(item["content"][0]["text"]), body["text"]["format"]["schema"])
    if whole["status"] == "completed":
        schemas = {tool["name"]: tool["parameters"] for tool in body.get("tools", [])}
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
