"""An engine's compiled grammars."""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLTokenizer

from baton.structured.checking import Checker
from baton.structured.matcher import Matcher
from baton.structured.source import limits, refused, source_of
from baton.structured.vocabulary import vocabulary
from baton.text import Tokenizer
from baton.wire import StructuredOutputsParams

MAX_COMPILED = 128


class Grammars:
    """Compiles grammars for one vocabulary, and keeps those used last. Thread-safe.

    The vocabulary is read at the first use: most engines never see a grammar.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: the model's."""
        self._tokenizer, self._model_vocab = tokenizer, vocab_size
        self._eos_ids = frozenset(tokenizer.eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._checker = Checker(tokenizer.json, vocab_size, sorted(self._eos_ids))
        self._tokens: LLTokenizer | None = None

    def check(self, asked: StructuredOutputsParams) -> None:
        """Compile a grammar that is not known yet, in a process of its own first, which is ended where it takes too
        long: seconds at worst, on the caller's thread. Raises `RequestError`."""
        if self._known(asked) is None:
            self._checker.check(source_of(asked))
            self._compile(asked)

    def matcher(self, asked: StructuredOutputsParams) -> Matcher:
        """A matcher at the beginning of a grammar that was checked here, or by the engine of which this is a rank.
        Raises `RequestError`."""
        compiled = self._known(asked)
        if compiled is None:
            compiled = self._compile(asked)
        tokens = self._vocabulary()
        with self._lock:  # another thread may be copying it too
            return Matcher(compiled, tokens.vocab_size, self._eos_ids)

    def close(self) -> None:
        """End the process that checks."""
        self._checker.close()

    def _known(self, asked: StructuredOutputsParams) -> LLMatcher | None:
        with self._lock:
            compiled = self._compiled.get(asked)
            if compiled is not None:
                self._compiled.move_to_end(asked)
            return compiled

    def _compile(self, asked: StructuredOutputsParams) -> LLMatcher:
        compiled = LLMatcher(self._vocabulary(), source_of(asked), log_level=0, limits=limits())
        if compiled.is_error():
            raise refused(compiled.get_error())
        with self._lock:
            self._compiled[asked] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokens is None:
                try:
                    self._tokens = vocabulary(self._tokenizer.json(), self._model_vocab, sorted(self._eos_ids))
                except ValueError as error:
                    raise refused(str(error)) from None
            return self._tokens
