"""Requests as LangChain, LiteLLM and `llm` send them, byte for byte, and what their answers must hold.

`tools/record_clients` let these clients talk to `before_vllm` of `deployments`, and kept what they sent.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema

RECORDED = Path(__file__).with_name("recorded")
CLIENTS = {path.stem: json.loads(path.read_text())["requests"] for path in sorted(RECORDED.glob("*.json"))}


def replay(url: str, path: str, body: str) -> None:
    """Send a recorded request again, and check the answer."""
    asked = json.loads(body)
    sent = urllib.request.Request(url + path, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent, timeout=60) as reply:
        text = reply.read().decode()
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
    """Of the kind that was asked for: words, JSON, JSON of a schema, or calls of its tools."""
    if "prompt" in body:
        assert choice["text"]
        return
    message, form, wanted = choice["message"], body.get("response_format") or {}, body.get("tool_choice")
    calls = message.get("tool_calls") or []
    if form.get("type") == "json_schema":
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(message["content"]), form["json_schema"]["schema"])
    elif form:
        # It may be cut off: no schema says when it ends.
        assert message["content"].lstrip().startswith("{")
    elif wanted in (None, "auto", "none"):
        assert message["content"] or calls
    else:
        assert calls
        assert not message["content"]
        # A schema that allows more than it names, as LangChain's, lets a small model go on up to its limit.
        assert choice["finish_reason"] in ("tool_calls", "stop", "length")
    if choice["finish_reason"] == "length":
        calls = calls[:-1]  # the last was cut off
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body.get("tools", [])}
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
        assert not isinstance(wanted, dict) or wanted["function"]["name"] == call["function"]["name"]
