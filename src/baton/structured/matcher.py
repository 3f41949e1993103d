"""The position of one request's output in its grammar."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from baton.structured.source import grammar_error

Bits = npt.NDArray[np.uint8]


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
    """A grammar at its beginning."""

    __slots__ = ("__weakref__", "matcher", "vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.matcher, self.vocab_size = matcher, vocab_size


class Matcher:
    """A position in a grammar. Not thread-safe.

    `eos_ids` are allowed if the grammar may end, and never consumed.
    """

    def __init__(self, compiled: Compiled, eos_ids: Container[int]) -> None:
        self._compiled, self._eos_ids = compiled, eos_ids
        self._num_bytes = (compiled.vocab_size + 31) // 32 * 4
        self._matcher = compiled.matcher.deep_copy()
        self._tokens: list[int] = []

    def advance(self, output_ids: Sequence[int]) -> None:
        """Move to the end of the output. Raises `RequestError` if they do not follow the grammar, or if that takes too
        much work.
        """
        num_same = _num_common(self._tokens, output_ids)
        surplus = len(self._tokens) - num_same
        if surplus and not self._matcher.rollback(surplus):
            self._matcher, num_same = self._compiled.matcher.deep_copy(), 0
        self._tokens = list(output_ids[:num_same])
        for token in output_ids[num_same:]:
            if not self.consume(token):
                raise grammar_error(self._matcher.get_error() or "the output does not follow it")

    def consume(self, token: int) -> bool:
        """False, without changes, if the token is not allowed or ends the output."""
        if token in self._eos_ids or self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tokens.append(token)
        return True

    def bits(self) -> Bits:
        """uint8 [bytes]. Raises `RequestError` if no token is allowed, or if it takes too much work."""
        bits = np.zeros(self._num_bytes, dtype=np.uint8)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error() or not bits.any():
            raise grammar_error(self._matcher.get_error() or "no token can go on")
        return bits

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
        return Allowed(np.stack(rows))

    def follows(self, output_ids: Sequence[int], drafts: Sequence[int]) -> int:
        self.advance(output_ids)
        for count, draft in enumerate(drafts):
            if not self.consume(draft):
                ends = draft in self._eos_ids and self._matcher.is_accepting()
                return count + ends
        return len(drafts)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    num = min(len(one), len(other))
    if one[:num] == other[:num]:
        return num
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
