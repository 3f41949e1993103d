"""Output under a grammar: it always follows the grammar, and the tokens are the same with any drafts, batches and
engines.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engine.request_checks import make_request
from baton.errors import RequestError
from baton.sampling_params import SamplingParams, StructuredOutputsParams
from baton.text import Tokenizer
from testkit.engines import EAGLE3, TARGET, Pair, Stepped, Stream, pair, request, stepped

PROMPT = "The with statement is used to"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", "zzz"]}, "maxItems": 3},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "count"],
    "additionalProperties": False,
}
REGEX = r"[a-z]{3,9} (yes|no), [0-9]{2}"
JSON = StructuredOutputsParams(json=json.dumps(SCHEMA), disable_any_whitespace=True)
GRAMMARS = [
    JSON,
    StructuredOutputsParams(regex=REGEX),
    StructuredOutputsParams(choice=("red", "green", "light blue")),
    StructuredOutputsParams(grammar='root ::= ("(" root ")" | [a-f]) root?'),
]
PENALISED = {"presence_penalty": 0.4, "repetition_penalty": 1.2, "top_p": 0.9, "min_p": 0.01, "min_tokens": 4}
PARAMS = [
    SamplingParams(max_tokens=40, seed=seed, temperature=temperature, structured_outputs=grammar, **more)
    for grammar in GRAMMARS
    for seed, (temperature, more) in enumerate([(0.0, {}), (0.8, {}), (1.0, PENALISED)])
]
COSTLY = StructuredOutputsParams(grammar='root ::= "a"{1,60000} root')
POOL = {"kv_cache_memory": 16 << 20}


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return Tokenizer.load(TARGET).encode(PROMPT)


@pytest.fixture(scope="module")
def plain() -> Iterator[Stepped]:
    with stepped(speculative_config=None, **POOL) as one:
        yield one


@pytest.fixture(scope="module")
def expected(plain: Stepped, prompt: list[int]) -> list[Stream]:
    return run_all(plain, prompt)


def run_all(one: Stepped, prompt: list[int], preempt: bool = False) -> list[Stream]:
    streams = [one.add(request(f"r{i}-{time.monotonic_ns()}", prompt, p)) for i, p in enumerate(PARAMS)]
    steps, scheduler = 0, one.core.scheduler
    while not all(stream.ended for stream in streams):
        one.step()
        steps += 1
        if preempt and steps % 2 == 0 and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
    assert one.is_idle()
    return streams


def num_accepted(one: Stepped) -> int:
    return sum(one.core.metrics.accepted_per_pos)


def assert_follows(one: Stepped, params: SamplingParams, stream: Stream) -> None:
    """A text that ended follows its grammar."""
    assert stream.error is None
    if stream.finish_reason == "length":
        assert len(stream.token_ids) == params.max_tokens
        return
    assert stream.finish_reason == "stop"
    tokenizer, asked = one.engine.tokenizer, params.structured_outputs
    assert asked is not None
    assert stream.token_ids[-1] in tokenizer.eos_token_ids
    text = tokenizer.decode(stream.token_ids[:-1])
    if asked.json is not None:
        value = json.loads(text)
        assert set(value) == set(SCHEMA["required"])  # type: ignore[arg-type]
        assert 0 <= value["count"] <= 999
    elif asked.regex is not None:
        assert re.fullmatch(asked.regex, text)
    elif asked.choice is not None:
        assert text in asked.choice


@pytest.mark.parametrize("preempt", [False, True], ids=["undisturbed", "preempted"])
@pytest.mark.parametrize("method", [EAGLE3, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}])
def test_speculation_changes_no_token(
    expected: list[Stream], prompt: list[int], method: dict[str, Any], preempt: bool
) -> None:
    from baton.engine.config import SpeculativeConfig

    with stepped(speculative_config=SpeculativeConfig.parse(json.dumps(method)), **POOL) as one:
        for params, want, have in zip(PARAMS, expected, run_all(one, prompt, preempt), strict=True):
            assert have.result == want.result
            assert_follows(one, params, have)
        if preempt:
            assert one.core.scheduler.num_preemptions > 2
        elif method is EAGLE3:
            # After its first token a choice is forced, and so are an object's names: the drafter follows the grammar.
            metrics = one.core.metrics
            assert num_accepted(one) / metrics.num_draft_tokens > 0.3


def test_without_the_drafters_masks_fewer_drafts_are_accepted(prompt: list[int]) -> None:
    with stepped(**POOL) as one:
        run_all(one, prompt)
        masked = num_accepted(one)
        one.core.forget_metrics()
        one.core.executor.runner._matchers = None  # type: ignore[attr-defined]
        run_all(one, prompt)
        assert num_accepted(one) < masked


def test_rejection_follows_the_grammar(prompt: list[int]) -> None:
    from baton.engine.config import SpeculativeConfig

    head = SpeculativeConfig.parse(json.dumps({**EAGLE3, "verifier": "rejection"}))
    with stepped(speculative_config=head, **POOL) as one:
        for params, have in zip(PARAMS, run_all(one, prompt), strict=True):
            assert_follows(one, params, have)


def test_handed_over_and_resumed_requests_go_on_in_their_grammar(
    expected: list[Stream], prompt: list[int], tmp_path: Path
) -> None:
    with pair(tmp_path, **POOL) as two:
        for index, (params, want) in enumerate(zip(PARAMS, expected, strict=True)):
            prefill, decode = two.legs(f"h{index}", prompt, params, "push")
            two.step_until(lambda p=prefill, d=decode: p.ended and d.ended)  # type: ignore[misc]
            assert prefill.token_ids == want.token_ids[:1]
            assert decode.result == want.result
        resume(two, prompt, PARAMS[1], expected[1])
        two.settle()


def resume(two: Pair, prompt: list[int], params: SamplingParams, want: Stream) -> None:
    for cut in (1, 4, len(want.token_ids) - 1):
        known = want.token_ids[:cut]
        prefill, decode = two.legs(f"again{cut}", prompt, params, "pull", known)
        two.step_until(lambda p=prefill, d=decode: p.ended and d.ended)  # type: ignore[misc]
        assert decode.token_ids == want.token_ids[cut:]
        assert decode.finish_reason == want.finish_reason


@pytest.mark.parametrize("index", [1, 4])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_request_resumes_alone(
    expected: list[Stream], plain: Stepped, prompt: list[int], index: int, cut: int
) -> None:
    known = expected[index].token_ids[:cut]
    have = plain.run(f"alone{index}{cut}", prompt, PARAMS[index], known)
    assert have.token_ids == expected[index].token_ids[cut:]


def test_a_grammar_ends_the_output_before_min_tokens(plain: Stepped, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=20, min_tokens=15, structured_outputs=GRAMMARS[2], seed=1)
    stream = plain.run("short", prompt, params)
    assert_follows(plain, params, stream)
    assert len(stream.token_ids) < 15
    # If the grammar allows more tokens, it continues.
    going = msgspec.structs.replace(params, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
    assert len(plain.run("long", prompt, going).token_ids) >= 15


def test_grammars_that_cannot_be_followed_are_refused(plain: Stepped, prompt: list[int]) -> None:
    broken = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(RequestError, match="grammar is refused") as refused:
        plain.add(request("broken", prompt, broken))
    assert refused.value.param == "structured_outputs"
    endless = msgspec.structs.replace(PARAMS[0], ignore_eos=True)
    with pytest.raises(RequestError, match="ignore_eos"):
        plain.add(request("endless", prompt, endless))
    with pytest.raises(RequestError, match="does not follow"):
        plain.add(request("known", prompt, PARAMS[0], known=prompt[:2]))
    grammars, plain.engine.grammars = plain.engine.grammars, None
    try:
        with pytest.raises(RequestError, match="no tokenizer") as refused:
            make_request(plain.engine, request("bare", prompt, PARAMS[0]))
        assert refused.value.param == "structured_outputs"
    finally:
        plain.engine.grammars = grammars


@pytest.mark.parametrize(
    ("more", "param"), [({"allowed_token_ids": (5,)}, "allowed_token_ids"), ({"bad_words": tuple("rgl")}, "bad_words")]
)
def test_a_grammar_without_an_allowed_token_ends_the_request(
    plain: Stepped, prompt: list[int], more: Any, param: str
) -> None:
    nothing = plain.add(request(param, prompt, msgspec.structs.replace(PARAMS[6], **more)))
    while not nothing.ended:
        plain.step()
    assert nothing.error == f"invalid_request: {param}: what the request allows leaves no token to choose"


def test_a_step_that_takes_too_much_work_ends_its_request_alone(
    plain: Stepped, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    costly = SamplingParams(
        max_tokens=30,
        temperature=0.0,
        structured_outputs=COSTLY,
    )
    grammars = plain.engine.grammars
    assert grammars is not None
    with pytest.raises(RequestError, match="Too many items"):
        grammars.check(COSTLY)
    keep = grammars.matcher(COSTLY)  # as if its costly step came after the checked ones
    other = plain.add(request("other", prompt, PARAMS[1]))
    stream = plain.add(request("costly", prompt, costly))
    num_forwards, execute = 0, plain.core.executor.execute

    def counted(*arguments: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        return execute(*arguments)

    monkeypatch.setattr(plain.core.executor, "execute", counted)
    num_steps = 0
    while not (stream.ended and other.ended):
        plain.step()
        num_steps += 1
    assert stream.finish_reason == "error"
    assert stream.error is not None
    assert stream.error.startswith("invalid_request: structured_outputs: the grammar is refused: ")
    assert other.finish_reason in ("stop", "length")
    # No row of the other request was computed twice.
    assert num_forwards == num_steps
    del keep
