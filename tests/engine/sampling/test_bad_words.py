"""`bad_words`: the output never contains one of the words, and is the same with any drafts and engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from baton.engine.sampling.bad_words import BadWords
from baton.errors import RequestError
from baton.sampling_params import SamplingParams, StructuredOutputsParams
from baton.text import Tokenizer
from baton.text.word_tokens import word_tokens
from testkit.engines import TARGET, Stepped, pair, request, stepped

POOL = {"kv_cache_memory": 16 << 20}
LENGTH = 32
WAYS = [
    SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=LENGTH, temperature=0.9, seed=3, top_p=0.95, ignore_eos=True),
    SamplingParams(max_tokens=LENGTH, temperature=0.0, presence_penalty=0.5, ignore_eos=True),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TARGET)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("The with statement is used to")


@pytest.fixture(scope="module")
def plain() -> Iterator[Stepped]:
    with stepped(speculative_config=None, **POOL) as one:
        yield one


def holds(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(list(tokens[i : i + len(word)]) == list(word) for i in range(len(tokens)))


def barring(one: Stepped, prompt: list[int], way: SamplingParams, name: str) -> tuple[SamplingParams, list[int]]:
    """Adds words of one to three tokens that the output contained so far, until the output contains other words.
    Returns the parameters and that output.
    """
    tokenizer, words = one.engine.tokenizer, list[str]()
    tokens = one.run(name, prompt, way).token_ids
    for round_, length in enumerate((3, 2, 1, 2)):
        texts = [tokenizer.decode(tokens[i : i + length]).strip() for i in range(len(tokens))]
        found = [text for text in texts if text and holds(tokens, word_tokens((text,), tokenizer, 2048)[-1])]
        words += [text for text in found if len(tokenizer.encode(text, add_special_tokens=False)) == length][1:3]
        params = msgspec.structs.replace(way, bad_words=tuple(words))
        before, tokens = tokens, one.run(f"{name}-{round_}", prompt, params).token_ids
        assert tokens != before
    lengths = {len(word) for word in word_tokens(tuple(words), tokenizer, 2048)}
    assert lengths >= {1, 2, 3}
    return params, tokens


@pytest.fixture(scope="module")
def asked(plain: Stepped, prompt: list[int]) -> list[tuple[SamplingParams, list[int]]]:
    return [barring(plain, prompt, way, f"way{index}") for index, way in enumerate(WAYS)]


def test_no_output_holds_a_word(asked: list[tuple[SamplingParams, list[int]]], tokenizer: Tokenizer) -> None:
    for params, tokens in asked:
        assert len(tokens) == LENGTH
        for word in word_tokens(params.bad_words, tokenizer, 2048):
            assert not holds(tokens, word)


def test_a_word_of_one_token_is_a_token_that_is_not_allowed(
    plain: Stepped, prompt: list[int], tokenizer: Tokenizer
) -> None:
    for index, way in enumerate(WAYS):
        before = plain.run(f"before{index}", prompt, way).token_ids
        text = next(
            text
            for token in before
            if (text := tokenizer.decode([token]).strip())
            and all(len(word) == 1 for word in word_tokens((text,), tokenizer, 2048))
        )
        barred = {word[0] for word in word_tokens((text,), tokenizer, 2048)}
        rest = tuple(i for i in range(2048) if i not in barred)
        by_ids = msgspec.structs.replace(way, allowed_token_ids=rest)
        by_word = msgspec.structs.replace(way, bad_words=(text,))
        have = plain.run(f"word{index}", prompt, by_word).token_ids
        assert have == plain.run(f"ids{index}", prompt, by_ids).token_ids
        assert have != before


def test_drafts_and_preemption_change_no_token(
    asked: list[tuple[SamplingParams, list[int]]], prompt: list[int]
) -> None:
    with stepped(**POOL) as one:
        streams = [one.add(request(f"r{index}", prompt, params)) for index, (params, _) in enumerate(asked)]
        steps, scheduler = 0, one.core.scheduler
        while not all(stream.ended for stream in streams):
            one.step()
            steps += 1
            if steps % 3 == 0 and scheduler.running:
                scheduler.preempt(scheduler.running[-1])
        assert [stream.token_ids for stream in streams] == [tokens for _, tokens in asked]
        assert sum(sum(stream.accepted) for stream in streams) > 0
        assert scheduler.num_preemptions > 2


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_handed_over_and_resumed_requests_go_on(
    asked: list[tuple[SamplingParams, list[int]]], prompt: list[int], tmp_path: Path, mode: str
) -> None:
    with pair(tmp_path, **POOL) as two, stepped(**POOL) as one:
        for index, (params, want) in enumerate(asked):
            accepted = one.run(f"one{index}", prompt, params).accepted
            # A word may have begun in the tokens that the client already has.
            for cut in (0, 1, 5, LENGTH // 2):
                known = want[:cut] or None
                prefill, decode = two.legs(f"r{index}-{cut}", prompt, params, mode, known)  # type: ignore[arg-type]
                two.step_until(lambda p=prefill, d=decode: p.ended and d.ended)  # type: ignore[misc]
                assert decode.token_ids == want[cut:]
                assert cut or decode.accepted == accepted
        two.settle()


def test_with_a_grammar_both_hold(plain: Stepped, prompt: list[int]) -> None:
    grammar = StructuredOutputsParams(regex="[a-z]{12} (yes|no)")
    asked = SamplingParams(max_tokens=20, temperature=0.0, structured_outputs=grammar)
    tokenizer = plain.engine.tokenizer
    free = plain.run("free", prompt, asked).token_ids
    word = tokenizer.decode(free[:2]).strip()
    params = msgspec.structs.replace(asked, bad_words=(word,))
    with stepped(**POOL) as drafting:
        made = [one.run("barred", prompt, params) for one in (plain, drafting)]
    assert made[0].result == made[1].result
    assert made[0].finish_reason == "stop"
    assert re.fullmatch("[a-z]{12} (yes|no)", tokenizer.decode(made[0].token_ids))
    assert all(
        holds(free, spelt) > holds(made[0].token_ids, spelt) for spelt in word_tokens((word,), tokenizer, 2048)[:1]
    )


def test_a_request_without_an_allowed_token_ends_with_an_error(prompt: list[int]) -> None:
    token = 5  # "!", which is a token of its own in "!!" too
    by_ids = SamplingParams(max_tokens=8, temperature=0.0, allowed_token_ids=(token,), bad_words=("!!",))
    grammar = StructuredOutputsParams(choice=("green",))
    by_grammar = SamplingParams(max_tokens=8, temperature=0.0, structured_outputs=grammar, bad_words=("green",))
    for settings in ({"speculative_config": None}, {}):
        with stepped(**settings, **POOL) as one:
            for params, text in ((by_ids, "!"), (by_grammar, "gre")):
                stream = one.run(text, prompt, params)
                assert one.engine.tokenizer.decode(stream.token_ids) == text
                assert stream.finish_reason == "error"
            assert one.run("next", prompt, WAYS[0]).finish_reason == "length"


def test_which_tokens_complete_a_word() -> None:
    words = BadWords([[7], [1, 2], [1, 3], [2, 1, 2], [4, 4, 4]])
    assert words.barred([]) == [7]
    assert words.barred([1]) == [7, 2, 3]
    words.advance([9, 2])
    assert words.barred([]) == [7]
    assert words.barred([1]) == [7, 2, 3, 2]
    words.advance([4])
    words.advance([4])
    assert words.barred([]) == [7, 4]
    assert words.barred([4]) == [7, 4]
    assert words.barred([5, 4]) == [7]
    assert not BadWords([])


@pytest.mark.parametrize("words", [("a",) * 129, ("",), ("a" * 1025,), (" ",), tuple("abcdefgh" * 16)])
def test_invalid_bad_words_are_refused(plain: Stepped, words: tuple[str, ...]) -> None:
    if len(words) == 128:  # equal words count once; a letter has a second token for the middle of a text
        plain.add(request("many", [5], SamplingParams(max_tokens=1, bad_words=words)))
        words = tuple(f"{letter}{i}" for letter in "abcd" for i in range(32))
    with pytest.raises(RequestError) as refused:
        plain.add(request("bad", [5], SamplingParams(max_tokens=1, bad_words=words)))
    assert refused.value.param == "bad_words"


def test_without_a_tokenizer_they_are_refused() -> None:
    with pytest.raises(RequestError, match="without a tokenizer") as refused:
        word_tokens(("a",), Tokenizer.load(TARGET, skip_vocabulary=True), 2048)
    assert refused.value.param == "bad_words"
