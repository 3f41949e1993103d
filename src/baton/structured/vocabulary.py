"""A tokenizer's vocabulary as bytes, for grammars."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer


def vocabulary(tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The bytes of each token, of byte-level vocabularies as of those with byte fallback. `vocab_size`: the model's,
    which may be greater than the tokenizer's: ids without a token are never allowed.

    Raises `ValueError` for a tokenizer of another kind.
    """
    try:
        own = LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
        if own.vocab_size >= vocab_size:
            return own
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))
    except BaseException as error:  # the binding panics with an exception that is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"this model's tokenizer cannot be used with grammars: {error}") from None
