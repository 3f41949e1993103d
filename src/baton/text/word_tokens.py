"""Tokenises words that an output must not contain (vLLM's `bad_words`)."""

from __future__ import annotations

import functools

from baton.errors import RequestError
from baton.sampling_params import MAX_BAD_WORDS
from baton.text.tokenizer import Tokenizer

PARAM = "bad_words"


@functools.lru_cache(maxsize=32)  # all samples of a prompt have the same words
def word_tokens(words: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the beginning of a text, and after a space if that gives as many tokens with a
    different first one, as in vLLM 0.32 (`SamplingParams.update_from_tokenizer`).

    Raises `RequestError`, also without a tokenizer.
    """
    if words and not tokenizer.vocab_size:
        raise RequestError("bad_words are not for an engine without a tokenizer", PARAM)
    sequences: list[list[int]] = []
    for word in dict.fromkeys(words):
        plain, spaced = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        if not plain:
            raise RequestError("bad_words must be at least one token each", PARAM)
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    if len(sequences) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words must be at most {MAX_BAD_WORDS} as tokens, these are {len(sequences)}", PARAM)
    if any(token >= vocab_size for tokens in sequences for token in tokens):
        raise RequestError("bad_words must be of tokens that the model has", PARAM)
    return tuple(map(tuple, sequences))
