"""An engine's compiled grammars."""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer

from baton.sampling_params import StructuredOutputsParams
from baton.structured.checker import Checker
from baton.structured.matcher import Compiled, Matcher
from baton.structured.source import grammar_error, parser_limits, source_of
from baton.structured.vocabulary import vocabulary
from baton.text import Tokenizer

MAX_COMPILED = 128


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the most recent ones. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_compiled: int = MAX_COMPILED) -> None:
        self._tokenizer, self._model_vocab, self._max_compiled = tokenizer, vocab_size, max_compiled
        self._eos_ids = frozenset(tokenizer.eos_token_ids)
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._recent: OrderedDict[StructuredOutputsParams, Compiled] = OrderedDict()
        # The engine thread must not compile a running request's grammar again.
        self._in_use: WeakValueDictionary[StructuredOutputsParams, Compiled] = WeakValueDictionary()
        self._checker = Checker(tokenizer.json, vocab_size, sorted(self._eos_ids))
        self._tokens: LLTokenizer | None = None

    def check(self, asked: StructuredOutputsParams) -> None:
        """Compiles a new grammar, first in the checker process with a time limit. May take seconds. Raises
        `RequestError`."""
        if self._known(asked) is None:
            self._checker.check(source_of(asked))
            self._compile(asked)

    def matcher(self, asked: StructuredOutputsParams) -> Matcher:
        """A matcher at the beginning of a grammar that this process or rank 0 has checked. Raises `RequestError`."""
        compiled = self._known(asked)
        if compiled is None:
            compiled = self._compile(asked)
        return Matcher(compiled, self._eos_ids)

    def close(self) -> None:
        self._checker.close()

    def _known(self, asked: StructuredOutputsParams) -> Compiled | None:
        with self._lock:
            compiled = self._in_use.get(asked)
            if compiled is None or compiled.is_worn:
                return None
            self._keep(asked, compiled)
            return compiled

    def _keep(self, asked: StructuredOutputsParams, compiled: Compiled) -> None:
        self._in_use[asked] = self._recent[asked] = compiled
        self._recent.move_to_end(asked)
        if len(self._recent) > self._max_compiled:
            self._recent.popitem(last=False)

    def _compile(self, asked: StructuredOutputsParams) -> Compiled:
        tokens, source = self._vocabulary(), source_of(asked)
        compiled = Compiled(lambda: LLMatcher(tokens, source, log_level=0, limits=parser_limits()), tokens.vocab_size)
        if compiled.matcher.is_error():
            raise grammar_error(compiled.matcher.get_error())
        with self._lock:
            self._keep(asked, compiled)
        return compiled

    def _vocabulary(self) -> LLTokenizer:
        with self._reading:  # may take a second
            if self._tokens is None:
                try:
                    self._tokens = vocabulary(self._tokenizer.json(), self._model_vocab, sorted(self._eos_ids))
                except ValueError as error:
                    raise grammar_error(str(error)) from None
            return self._tokens
