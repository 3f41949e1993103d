"""Fake vLLM servers that answer as requested: a value of a schema, a call of a tool, or words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from baton.text import Tokenizer
from testkit.servers.fake_vllm import EOS, FakeVllm

BEGIN = "<assistant>"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}" + BEGIN
)


@dataclass
class ObedientVllm(FakeVllm):
    """Its answer depends only on the prompt and the grammar of a request, as a greedy model's does."""

    def _output(self, body: dict[str, Any]) -> tuple[list[int], str]:
        tokenizer = Tokenizer.load(self.root)
        # Text after the prompt's end came from another leg.
        text = tokenizer.decode(body["prompt"], skip_special_tokens=False)
        prompt, _, said = text.rpartition(BEGIN) if BEGIN in text else (text, "", "")
        tokens = [*tokenizer.encode(answer(prompt, body.get("structured_outputs")), False), EOS]
        rest = tokens[len(tokenizer.encode(said, False)) :][: body["max_tokens"]]
        return rest, "stop" if rest[-1] == EOS else "length"


def answer(prompt: str, grammar: dict[str, Any] | None) -> str:
    if grammar is not None and (grammar.get("json_object") or grammar.get("json") is not None):
        schema = grammar.get("json") or {}
        return json.dumps(instance(json.loads(schema) if isinstance(schema, str) else schema, schema))
    tools = json.loads(prompt.splitlines()[0]) if prompt.startswith("[") else []
    if not tools or "<tool>" in prompt:
        return "It is sunny."
    function = tools[0]["function"]
    call = {"name": function["name"], "arguments": instance(function["parameters"], function["parameters"])}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def instance(schema: dict[str, Any], root: Any) -> Any:
    """A value of a schema as clients make them; references are resolved in `root`."""
    root = json.loads(root) if isinstance(root, str) else root
    if "$ref" in schema:
        return instance(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return instance(schema[key][0], root)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: instance(each, root) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance(schema["items"], root)] * max(1, schema.get("minItems", 0))
    return {"string": "x", "integer": schema.get("minimum", 0), "number": 0.5, "boolean": True, "null": None}[kind]
