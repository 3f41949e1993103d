"""Bad words become the same tokens as in the installed vLLM, and are barred in the same cases."""

from __future__ import annotations

import random

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import get_tokenizer
from vllm.v1.sample.ops.bad_words import apply_bad_words

from baton import sampling_params
from baton.engine.sampling.bad_words import BadWords
from baton.errors import RequestError
from baton.text import Tokenizer
from baton.text.word_tokens import word_tokens

MODEL = "models/baton-demo-llama"
WORDS = [
    "the",
    " the",
    "  the",
    "The with",
    "a",
    "!",
    "!!",
    "list\n",
    "é",
    "你好",
    "return x",
    "a",
    "</s>",
    "\tdef",
    "0x1F",
]


def theirs(words: list[str]) -> list[list[int]]:
    params = SamplingParams(bad_words=words)
    params.update_from_tokenizer(get_tokenizer(MODEL))
    return params.bad_words_token_ids or []


def test_words_are_the_same_tokens() -> None:
    tokenizer = Tokenizer.load(MODEL)
    for words in [*([word] for word in WORDS), WORDS]:
        assert [list(tokens) for tokens in word_tokens(tuple(words), tokenizer, 2048)] == theirs(words)
    with_space = [words for words in theirs(WORDS) if Tokenizer.load(MODEL).decode(words).startswith(" ")]
    assert with_space, "some words are other tokens within a text"


@pytest.mark.parametrize("words", [[" "], ["ok", ""], [f"w{i}" for i in range(129)]])
def test_what_is_no_word_there_is_none_here(words: list[str]) -> None:
    with pytest.raises((VLLMValidationError, ValueError)):
        theirs(words)
    with pytest.raises(RequestError):
        refused_here(tuple(words))


def refused_here(words: tuple[str, ...]) -> None:
    sampling_params.SamplingParams(bad_words=words).check()
    word_tokens(words, Tokenizer.load(MODEL), 2048)


def test_the_same_tokens_are_barred() -> None:
    draw = random.Random(5)
    for _ in range(300):
        words = [[draw.randrange(4) for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(1, 6))]
        output = [draw.randrange(4) for _ in range(draw.randrange(8))]
        cut = draw.randint(0, len(output))
        ours = BadWords(words)
        for token in output[:cut]:
            ours.advance([token])
        logits = torch.zeros(1, 4)
        apply_bad_words(logits, {0: words}, [output])
        assert set(ours.barred(output[cut:])) == set(torch.isinf(logits[0]).nonzero().flatten().tolist())
