"""A tokenizer's vocabulary for `llguidance`."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer


def vocabulary(tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The bytes of each token, for byte-level vocabularies and those with byte fallback. `vocab_size` is the model's.
    Ids beyond the tokenizer's are never allowed. Raises `ValueError` for other kinds of tokenizers."""
    try:
        own = LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
        if own.vocab_size >= vocab_size:
            return own
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))
    except BaseException as error:  # a panic of the binding is not an `Exception`
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"this model's tokenizer cannot be used with grammars: {error}") from None
