"""The position of one request's output in its grammar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from baton.errors import RequestError
from baton.structured.source import grammar_error

Bits = npt.NDArray[np.uint8]
# llguidance's errors that copies share.
_OF_LEXER = "lexer error"
_LONGEST_S = 0.1
_RENEWING_S, _RENEWING_SHARE = 0.25, 0.05


@dataclass(frozen=True, slots=True)
class Allowed:
    """The allowed tokens of a request's first rows. `bits`: as of `Masks`."""

    bits: Bits

    def has_other_than(self, row: int, token_ids: npt.NDArray[np.int64]) -> bool:
        allowed = np.unpackbits(self.bits[row], bitorder="little")
        allowed[token_ids] = 0
        return bool(allowed.any())

    def num_followed(self, drafts: Sequence[int]) -> int:
        """How many leading drafts are allowed and leave some token allowed after them."""
        for row, draft in enumerate(drafts):
            if not self.bits[row, draft // 8] >> draft % 8 & 1 or not self.bits[row + 1].any():
                return row
        return len(drafts)


class Compiled:
    """A grammar at its beginning. Copies share a lexer, and its limits: after an error `renew` compiles it again.
    `is_worn`: that takes too long.
    """

    __slots__ = (
        *("__weakref__", "_compile", "_lock", "_longest_s", "_renewing_s", "_seconds", "_since"),
        *("is_worn", "matcher", "vocab_size"),
    )

    def __init__(self, compile_it: Callable[[], LLMatcher], vocab_size: int, longest_s: float = _LONGEST_S) -> None:
        self._compile, self.vocab_size, self.is_worn = compile_it, vocab_size, False
        self._lock, self._longest_s = threading.Lock(), longest_s
        self._since, began = time.monotonic(), time.thread_time()  # waits left out
        self.matcher = compile_it()
        self._seconds, self._renewing_s = time.thread_time() - began, 0.0

    def copied(self) -> tuple[LLMatcher, LLMatcher]:
        with self._lock:  # another thread may be copying it too
            return self.matcher, self.matcher.deep_copy()

    def renew(self) -> bool:
        allowed_s = _RENEWING_S + _RENEWING_SHARE * (time.monotonic() - self._since)
        self.is_worn = self._seconds > self._longest_s or self._renewing_s > allowed_s
        if not self.is_worn:
            self.matcher = self._compile()
            self._renewing_s += self._seconds
        return not self.is_worn


class Matcher:
    """A position in a grammar. Not thread-safe.

    `eos_ids` are allowed if the grammar may end, and never consumed.
    """

    def __init__(self, compiled: Compiled, eos_ids: Container[int]) -> None:
        self._compiled, self._eos_ids = compiled, eos_ids
        self._num_bytes = (compiled.vocab_size + 31) // 32 * 4
        self._copy()
        self._tokens: list[int] = []
        # The masks of positions after drafts, by number of tokens, which `follows` computes and `allowed` uses.
        self._masks: dict[int, Bits] = {}
        self._masked: list[int] = []

    def _copy(self) -> None:
        self._origin, self._matcher = self._compiled.copied()

    def _renewed(self) -> bool:
        """Move to the same position of a new lexer."""
        if self._origin is self._compiled.matcher and not self._compiled.renew():
            return False
        self._copy()
        wanted, taken = len(self._tokens), int(self._matcher.try_consume_tokens(self._tokens))
        self._tokens = self._tokens[:taken]
        return taken == wanted

    def advance(self, output_ids: Sequence[int]) -> None:
        """Move to the end of the output. Raises `RequestError` if they do not follow the grammar, or if that takes too
        much work.
        """
        num_same = _num_common(self._tokens, output_ids)
        surplus = len(self._tokens) - num_same
        if surplus and not self._matcher.rollback(surplus):
            self._copy()
            num_same = 0
        self._tokens = list(output_ids[:num_same])
        for token in output_ids[num_same:]:
            if not self.consume(token):
                raise grammar_error(self._matcher.get_error() or "the output does not follow it")

    def consume(self, token: int) -> bool:
        """False, without changes, if the token is not allowed or ends the output."""
        if token in self._eos_ids or not (self._take(token) or self._take_renewed(token)):
            return False
        number = len(self._tokens)
        if self._masked[number : number + 1] != [token]:
            if number < len(self._masked):
                self._masks.clear()
            self._masked[number:] = [token]
        self._tokens.append(token)
        return True

    def _take(self, token: int) -> bool:
        return int(self._matcher.try_consume_tokens([token])) == 1

    def _take_renewed(self, token: int) -> bool:
        try:
            if not self.bits()[token // 8] >> token % 8 & 1:
                return False
        except RequestError:
            return False
        return self._take(token) or (self._renewed() and self._take(token))

    def bits(self) -> Bits:
        """uint8 [bytes]. Raises `RequestError` if no token is allowed, or if it takes too much work."""
        bits = self._masks.get(len(self._tokens))
        if bits is None:
            bits = self._mask()
        if bits is None and self._matcher.get_error().startswith(_OF_LEXER) and self._renewed():
            bits = self._mask()
        if bits is None:
            raise grammar_error(self._matcher.get_error() or "no token can go on")
        return bits

    def _mask(self) -> Bits | None:
        bits = np.zeros(self._num_bytes, dtype=np.uint8)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return None if self._matcher.is_error() or not bits.any() else bits

    def allowed(self, output_ids: Sequence[int], drafts: Sequence[int]) -> Allowed:
        """The allowed tokens for the next position and after each draft, up to the first forbidden draft. Raises
        `RequestError`.
        """
        self.advance(output_ids)
        rows = [self.bits()]
        for draft in drafts:
            if not self.consume(draft):
                break
            rows.append(self.bits())
        self._masks.clear()
        return Allowed(np.stack(rows))

    def follows(self, output_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """How many leading drafts are allowed, with a token after each, or end the output."""
        self.advance(output_ids)
        for count, draft in enumerate(drafts):
            if not self.consume(draft):
                ends = draft in self._eos_ids and self._matcher.is_accepting()
                return count + ends
            try:
                self._masks[len(self._tokens)] = self.bits()
            except RequestError:
                # The output may never contain these drafts, so this is no error yet.
                return count
        return len(drafts)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    num = min(len(one), len(other))
    if one[:num] == other[:num]:
        return num
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
