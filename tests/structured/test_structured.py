"""Masks, matchers that move over drafts, vocabularies as bytes, and hostile grammars."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import baton.structured.grammars as grammars_module
from baton.errors import BatonError, EngineUnavailableError, RequestError
from baton.sampling_params import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from baton.structured import DraftMatchers, Grammars, Known, Matcher
from baton.structured.checker import Checker
from baton.structured.matcher import Compiled
from baton.structured.vocabulary import vocabulary
from baton.text import Tokenizer

DEMO = "models/baton-demo-llama"
SCHEMA = StructuredOutputsParams(
    json=json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    disable_any_whitespace=True,
)
KINDS = [
    SCHEMA,
    StructuredOutputsParams(regex=r"[a-c]{2,5}(é|€)?"),
    StructuredOutputsParams(choice=("red", "green", 'with "quotes"\n', "\\d")),
    StructuredOutputsParams(grammar='root ::= "x" root "y" | "z"'),
    StructuredOutputsParams(grammar='start: "a"+ ["b"]'),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer, tokenizer.vocab_size + 5)  # as if the model's table is padded
    yield made
    made.close()


def test_the_grammars_of_requests_that_run_stay_compiled(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size, max_compiled=2)
    compiled: list[str] = []
    source_of = grammars_module.source_of
    monkeypatch.setattr(
        grammars_module, "source_of", lambda asked: compiled.append(str(asked.regex)) or source_of(asked)
    )
    running = grammars.matcher(StructuredOutputsParams(regex="a"))
    for regex in "bcda":
        grammars.matcher(StructuredOutputsParams(regex=regex))
    assert compiled == ["a", "b", "c", "d"]
    del running
    for regex in "bca":
        grammars.matcher(StructuredOutputsParams(regex=regex))
    assert compiled == ["a", "b", "c", "d", "b", "c", "a"]


def ids_of(bits: np.ndarray) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
    return found


def walk(matcher: Matcher, eos: int, seed: int, length: int = 24) -> list[int]:
    """Tokens drawn from the allowed ones, to the end of the grammar or at most `length`."""
    draw, tokens = random.Random(seed), list[int]()
    for _ in range(length):
        matcher.advance(tokens)
        token = draw.choice(ids_of(matcher.bits()))
        if token == eos:
            return tokens
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_masks_after_drafts_are_those_of_a_fresh_matcher(
    grammars: Grammars, tokenizer: Tokenizer, kind: StructuredOutputsParams
) -> None:
    eos = tokenizer.eos_token_ids[0]
    moved = grammars.matcher(kind)
    for seed in range(4):
        tokens = walk(grammars.matcher(kind), eos, seed)
        draw = random.Random(seed)
        for _ in range(6):
            cut = draw.randrange(len(tokens) + 1)
            drafts = tokens[cut : cut + 3]
            if draw.random() < 0.4 and drafts:
                drafts[-1] = draw.randrange(tokenizer.vocab_size)
            rows = moved.allowed(tokens[:cut], drafts).bits
            for row, bits in enumerate(rows):
                fresh = grammars.matcher(kind)
                fresh.advance([*tokens[:cut], *drafts[:row]])
                assert np.array_equal(bits, fresh.bits())
                assert max(ids_of(bits)) < tokenizer.vocab_size
            # The first draft that is not allowed ends the rows.
            if len(rows) <= len(drafts):
                assert drafts[len(rows) - 1] not in ids_of(rows[-1]) or drafts[len(rows) - 1] == eos
            assert moved.follows(tokens[:cut], drafts) >= len(rows) - 1


def test_a_grammar_does_not_wear_out_by_the_outputs_of_others(tokenizer: Tokenizer) -> None:
    """Matchers share a lexer, which has a limit of states: two outputs of this grammar reach it."""
    grammars, eos = Grammars(tokenizer, tokenizer.vocab_size), tokenizer.eos_token_ids[0]
    kind = StructuredOutputsParams(regex="[ -~]*a[ -~]{40}c[ -~]*|[ -~]*b[ -~]{41}f|[ -~]*c[ -~]{43}f")
    running = grammars.matcher(kind)
    ends = [walk(grammars.matcher(kind), eos, seed, 60) for seed in range(6)]
    assert [len(tokens) for tokens in ends] == [60] * 6
    # Also one that began before.
    assert walk(running, eos, 2, 60) == ends[2]


def test_a_worn_grammar_that_takes_long_to_compile_is_not_compiled_between_steps() -> None:
    """A new request does not use it, and compiles it elsewhere."""
    made = list[Any]()

    def compile_it() -> Any:
        made.append("compiled")
        return made

    compiled = Compiled(compile_it, 8, longest_s=-1.0)
    assert not compiled.renew()
    assert (compiled.is_worn, len(made)) == (True, 1)


def test_a_grammar_whose_compilation_waited_for_a_core_is_compiled_again() -> None:
    def compile_it() -> Any:
        time.sleep(0.3)

    compiled = Compiled(compile_it, 8)
    assert compiled.renew()
    assert not compiled.is_worn


def test_a_draft_after_which_the_grammar_fails_is_not_followed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Without drafts the output may never come there. Nor do other requests fail."""
    several = " & ".join(
        f"/([ -~]*{one}[ -~]{{{30 + at}}}[^{no}]*)/" for at, (one, no) in enumerate(("ac", "bd", "eg"))
    )
    kind = StructuredOutputsParams(grammar=f'start: "x" /[a-z ]{{0,30}}/ | "y" Z\nZ: {several}')
    matcher = grammars.matcher(kind)
    output, drafts = (tokenizer.encode(text, add_special_tokens=False) for text in ("y", "ab"))
    assert matcher.follows(output, drafts) == 0
    assert len(matcher.allowed(output, []).bits) == 1
    with pytest.raises(RequestError, match="too many expressions"):
        matcher.allowed(output, drafts)
    other = grammars.matcher(kind)
    assert other.consume(tokenizer.encode("x", add_special_tokens=False)[0])
    assert other.bits().any()


def test_texts_of_a_grammar_match_it(grammars: Grammars, tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_ids[0]
    texts = {tokenizer.decode(walk(grammars.matcher(KINDS[2]), eos, seed)) for seed in range(12)}
    assert texts <= set(KINDS[2].choice or ())
    assert len(texts) > 1
    kind = StructuredOutputsParams(regex=r"\{\"a\": -?[1-9][0-9]{1,5}\}")
    for seed in range(8):
        assert abs(json.loads(tokenizer.decode(walk(grammars.matcher(kind), eos, seed)))["a"]) >= 10


def test_the_end_is_allowed_where_the_grammar_may_end_alone(grammars: Grammars, tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_ids[0]
    matcher = grammars.matcher(StructuredOutputsParams(regex="ab?"))
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False)[-1:] for text in ("a", "b"))
    ends = {tuple(tokens): eos in ids_of(matcher.allowed(tokens, []).bits[0]) for tokens in ([], [a], [a, b])}
    assert ends == {(): False, (a,): True, (a, b): True}
    assert ids_of(matcher.allowed([a, b], []).bits[0]) == [eos]
    # No row follows an end, and a draft that ends the output is accepted.
    assert len(matcher.allowed([a], [eos, a]).bits) == 1
    assert matcher.follows([a], [b, eos, a]) == 2
    assert matcher.follows([], [b, eos]) == 0


def test_output_that_does_not_follow_is_refused(grammars: Grammars, tokenizer: Tokenizer) -> None:
    known = tokenizer.encode("no JSON", add_special_tokens=False)
    with pytest.raises(RequestError, match="does not follow"):
        grammars.matcher(SCHEMA).advance(known)


def test_drafts_are_chosen_under_the_grammar_from_tokens_alone(grammars: Grammars, tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_ids[0]
    tokens = walk(grammars.matcher(SCHEMA), eos, 1)
    drafts = DraftMatchers(grammars)
    for cut in (3, 5, 2, 4):  # as after a rejected draft, or a resumption
        known = Known("a", SCHEMA, np.array(tokens[:cut]))
        constrained = drafts.at([None, known])
        assert constrained.bits(0) is None
        for token in tokens[cut : cut + 2]:
            fresh = grammars.matcher(SCHEMA)
            fresh.advance(tokens[:cut])
            bits = constrained.bits(1)
            assert bits is not None
            assert token in ids_of(bits)
            constrained.chose(1, token)
        constrained.chose(1, eos)
        assert constrained.bits(1) is None


def byte_fallback() -> tokenizers.Tokenizer:
    """As in sentencepiece: spaces are ▁, unknown characters bytes <0x..>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "é", "▁ab"]
    made = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def test_tokens_of_byte_fallback_stand_for_their_bytes() -> None:
    made = byte_fallback()
    tokens = vocabulary(made.to_str(), made.get_vocab_size(), [2])
    for piece, want in {"<0xC3>": b"\xc3", "▁ab": b" ab", "é": "é".encode(), "a": b"a", "<0x20>": b" "}.items():
        assert tokens.decode_bytes([made.token_to_id(piece)]) == want, piece


def test_tokens_of_byte_level_stand_for_their_bytes(tokenizer: Tokenizer) -> None:
    tokens = vocabulary(tokenizer.json(), tokenizer.vocab_size, tokenizer.eos_token_ids)
    token_bytes = [tokens.decode_bytes([i]) for i in range(tokenizer.vocab_size)]
    assert sum(not spelt for spelt in token_bytes) <= 1 + len(tokenizer.special_ids)  # byte 0xFF is in no text
    for i in range(tokenizer.vocab_size):
        if i not in tokenizer.special_ids and token_bytes[i]:
            assert token_bytes[i].decode("utf-8", "replace") == tokenizer.decode([i])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def of(schema: object) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=json.dumps(schema))


HOSTILE = {
    "repeats its repetitions": StructuredOutputsParams(regex="((a{1000}){1000}){1000}"),
    "repeats them in a pattern": of({"items": {"pattern": "^((a{1000}){1000}){1000}$"}}),
    "repeats them in a grammar": StructuredOutputsParams(grammar="start: /((a{999}){999}){999}/"),
    "takes long to compile": of({"type": "integer", "multipleOf": 999983}),
    "deep": of(nested(300)),
    "deep beyond Python": StructuredOutputsParams(json="[" * 20_000),
    "deep regex": StructuredOutputsParams(regex="(" * 9000 + "a" + ")" * 9000),
    "deep Lark": StructuredOutputsParams(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "refers to itself": of({"$ref": "#"}),
    "exponential": of({"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]}),
    "no schema": of([1]),
    "no JSON": StructuredOutputsParams(json="{"),
    "allows nothing": of(False),
    "not implemented": of({"not": {"type": "string"}}),
    "elsewhere": of({"$ref": "http://127.0.0.1:1/schema.json"}),
    "options": of({"type": "object", "x-guidance": {"item_separator": "!"}}),
    "no regex": StructuredOutputsParams(regex="(a"),
    "no grammar": StructuredOutputsParams(grammar="start: missing"),
    "endless": StructuredOutputsParams(grammar="start: start"),
}


def test_hostile_grammars_are_refused_in_time(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.check(KINDS[1])
    with monkeypatch.context() as patch:
        patch.setattr("baton.structured.checker.CHECK_LIMIT_S", 1.0)
        for name, hostile in HOSTILE.items():
            hostile.check()
            with pytest.raises(RequestError) as refused:
                grammars.check(hostile)
            assert refused.value.param == "structured_outputs", name
            assert len(str(refused.value)) < 400, name
    grammars.check(StructuredOutputsParams(regex="sound"))  # by a new process


@pytest.mark.parametrize(
    "asked",
    [
        StructuredOutputsParams(),
        StructuredOutputsParams(regex="a", grammar="b"),
        StructuredOutputsParams(choice=()),
        StructuredOutputsParams(choice=("a", "")),
        StructuredOutputsParams(regex="a" * (MAX_GRAMMAR_CHARS + 1)),
        StructuredOutputsParams(regex="a", disable_any_whitespace=True),
    ],
    ids=lambda asked: str(asked)[:60],
)
def test_invalid_structured_outputs_are_refused(asked: StructuredOutputsParams) -> None:
    with pytest.raises(RequestError) as refused:
        asked.check()
    assert refused.value.param == "structured_outputs"


def test_a_choice_of_very_many_texts(grammars: Grammars) -> None:
    """Some are prefixes of others, and one has control characters."""
    choice = StructuredOutputsParams(choice=('\x00\x7f"', *map(str, range(9000))))
    grammars.check(choice)
    matcher = grammars.matcher(choice)
    one = grammars._tokenizer.encode("1", False)
    assert matcher.follows(one, one) == len(one)
    assert matcher.allowed(one, one * 2).bits.any(axis=1).all()


def test_a_schema_that_only_refers_to_itself_allows_nothing(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match=r"the grammar is refused: it allows no output$"):
        grammars.check(StructuredOutputsParams(json='{"$ref": "#"}'))


def test_a_tokenizer_without_bytes_is_refused(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    grammars = Grammars(Tokenizer.load(tmp_path), 2)
    try:
        with pytest.raises(RequestError, match="grammar is refused"):
            grammars.check(StructuredOutputsParams(regex="b"))
    finally:
        grammars.close()


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        (0o700, RequestError("the grammar is refused: the process that checks grammars did not start")),
        (0o600, EngineUnavailableError("the process that checks grammars cannot be started: Permission denied")),
    ],
    ids=["does not read", "cannot be started"],
)
def test_a_checking_process_that_does_not_work(
    mode: int, error: BatonError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe of one that does not read holds less than a tokenizer."""
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(mode)
    monkeypatch.setattr("baton.structured.checker.PYTHON", (str(hangs),))
    monkeypatch.setattr("baton.structured.checker.START_LIMIT_S", 0.2)
    checker = Checker(lambda: "x" * 4_000_000, 10, [1])
    try:
        with pytest.raises(type(error), match=str(error)):
            checker.check("root ::= 'a'")
    finally:
        checker.close()


def test_a_lower_limit_of_memory_stays() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "
    check = "from baton.structured.check_process import limit_memory; limit_memory(); "
    command = [sys.executable, "-c", limit + check + "print(resource.getrlimit(resource.RLIMIT_AS))"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{(3 << 30, 3 << 30)}\n"
