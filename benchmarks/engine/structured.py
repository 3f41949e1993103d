"""`python -m benchmarks.engine.structured`: JSON under 200 schemas, speculation on and off, P/D and one engine.

All tokens must be the same, and every complete answer valid according to `jsonschema` (MIT licence). The schemas are
drawn here, from the keywords of JSON Schema 2020-12 that `llguidance` implements.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import jsonschema
import msgspec

from baton import LLM, SamplingParams, StructuredOutputsParams
from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from baton.errors import RequestError
from baton.structured import Grammars
from baton.text import Tokenizer
from benchmarks.demo import SPECULATIVE, TARGET

PROMPT = "The with statement is used to"
MAX_TOKENS = 192


def draw_schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Schemas with short instances: strings and lists are bounded."""
    draw = random.Random(seed)
    return [{**_object(draw, 2), "$defs": {"part": _value(draw, 0)}} for _ in range(count)]


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(["id", "name", "tags", "size", "when", "kind", "next", "ok"], draw.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(draw, depth - 1) for name in names},
        "required": names[: draw.randint(1, len(names))],
        "additionalProperties": False,
    }
    if draw.random() < 0.15:
        schema["properties"][names[0]] = {"$ref": "#/$defs/part"}
    return schema


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    plain: list[dict[str, Any]] = [
        {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 8)},
        {"type": "string", "pattern": draw.choice(["^[a-z]{2,6}$", "^\\d{3}-[A-F]{2}$", "^(yes|no|maybe)$"])},
        {"type": "string", "format": draw.choice(["date", "time", "ipv4", "uuid"])},
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(1, 500)},
        {"type": "integer", "minimum": 0, "maximum": 999, "multipleOf": draw.choice([2, 5, 7])},
        {"type": "number", "minimum": low, "exclusiveMaximum": low + 10},
        {"type": "boolean"},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        {"enum": ["red", 7, None, {"a": [1]}, "é"]},
        {"const": draw.choice(["fixed", 3, [True]])},
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
        {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 20}]},
    ]
    if depth <= 0 or draw.random() < 0.6:
        return draw.choice(plain)
    if draw.random() < 0.5:
        return _object(draw, depth)
    items: dict[str, Any] = {"type": "array", "items": _value(draw, depth - 1), "maxItems": draw.randint(1, 3)}
    if draw.random() < 0.3:
        items["prefixItems"] = [_value(draw, 0)]
    return items


@dataclass(frozen=True, slots=True)
class Answer:
    """One output: its tokens, text, finish reason, and the accepted drafts of each round."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    accepted: list[int]


def params_of(schemas: Sequence[dict[str, Any]]) -> list[SamplingParams]:
    """A greedy request for each even schema, a sampled one for each odd."""
    return [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=0.9 * (index % 2),
            seed=index,
            structured_outputs=StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True),
        )
        for index, schema in enumerate(schemas)
    ]


def alone(params: Sequence[SamplingParams], speculative: dict[str, Any] | None) -> tuple[list[Answer], float, float]:
    """Answers of one engine, and microseconds of its thread per token: with the grammars, and for as many tokens
    without.
    """
    with LLM(TARGET, kv_cache_memory=64 << 20, batch_invariant=True, speculative_config=speculative) as llm:
        for one in params[:1]:  # warm up what is compiled on first use
            llm.generate(PROMPT, one)
        results, constrained = _timed(lambda: llm.generate([PROMPT] * len(params), params))
        outputs = [result.outputs[0] for result in results]
        free = [
            msgspec.structs.replace(one, structured_outputs=None, ignore_eos=True, max_tokens=len(output.token_ids))
            for one, output in zip(params, outputs, strict=True)
        ]
        _, unconstrained = _timed(lambda: llm.generate([PROMPT] * len(params), free))
    num_tokens = sum(len(output.token_ids) for output in outputs)
    answers = [Answer(list(out.token_ids), out.text, out.finish_reason, list(out.accepted)) for out in outputs]
    return answers, 1e6 * constrained / num_tokens, 1e6 * unconstrained / num_tokens


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.thread_time()
    return call(), time.thread_time() - began


def handed_over(params: Sequence[SamplingParams], speculative: dict[str, Any] | None) -> list[Answer]:
    """Answers of a prefill and a decode engine with a router."""
    flags = ["--batch-invariant", *(["--speculative-config", json.dumps(speculative)] if speculative else [])]
    router = ["--max-local-prefill-length", "0"]
    with Deployment(TARGET, prefill=1, decode=1, engine_flags=flags, router_flags=router) as deployment:
        return asyncio.run(_ask(deployment.url, params))


async def _ask(url: str, params: Sequence[SamplingParams]) -> list[Answer]:
    tokenizer = Tokenizer.load(TARGET)
    prompt, at_once = tokenizer.encode(PROMPT), asyncio.Semaphore(8)
    async with aiohttp.ClientSession() as session:

        async def ask(one: SamplingParams) -> Answer:
            assert one.structured_outputs is not None
            body = {"model": "baton-demo-llama", "prompt": prompt, "return_token_ids": True}
            body |= {"max_tokens": one.max_tokens, "temperature": one.temperature, "seed": one.seed}
            body["structured_outputs"] = {
                "json": one.structured_outputs.json,
                "disable_any_whitespace": one.structured_outputs.disable_any_whitespace,
            }
            async with at_once:
                out = await stream_completion(session, url, body)
            return Answer(list(out.token_ids), out.text, out.finish_reason, list(out.accepted))

        return list(await asyncio.gather(*map(ask, params)))


def check(schemas: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> int:
    """Returns the number of complete answers. Raises `jsonschema.ValidationError` if one violates its schema."""
    complete = 0
    for schema, answer in zip(schemas, answers, strict=True):
        if answer.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
            complete += 1
    return complete


def supported(schemas: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first `count` schemas that compile."""
    found: list[dict[str, Any]] = []
    tokenizer = Tokenizer.load(TARGET)
    with contextlib.closing(Grammars(tokenizer, tokenizer.vocab_size)) as grammars:
        for schema, params in zip(schemas, params_of(schemas), strict=True):
            assert params.structured_outputs is not None
            try:
                grammars.check(params.structured_outputs)
            except RequestError as error:
                print(f"left out: {error}")
                continue
            found.append(schema)
            if len(found) == count:
                break
    return found


def main() -> int:
    """Returns the exit status: 0 if all tokens are the same and all complete answers valid."""
    schemas = supported(draw_schemas(260), 200)
    params = params_of(schemas)
    expected, cost, free = alone(params, None)
    rows = [("one engine, no speculation", expected, f"{cost:.0f} us/token, {free:.0f} without grammars")]
    answers, cost, free = alone(params, SPECULATIVE)
    rows.append(("one engine, EAGLE-3", answers, f"{cost:.0f} us/token, {free:.0f} without grammars"))
    rows.append(("P/D, no speculation", handed_over(params, None), ""))
    rows.append(("P/D, EAGLE-3", handed_over(params, SPECULATIVE), ""))
    different = 0
    for name, answers, note in rows:
        same = sum(have.token_ids == want.token_ids for have, want in zip(answers, expected, strict=True))
        different += len(schemas) - same
        rounds = [accepted for answer in answers for accepted in answer.accepted]
        drafts = f", {sum(rounds) / len(rounds):.2f} of 3 drafts accepted a round" if rounds else ""
        print(f"{name}: {same}/{len(schemas)} identical, {check(schemas, answers)} complete, all valid{drafts} {note}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
