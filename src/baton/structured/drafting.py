"""Constrains drafts by grammars. Drafting may run in a process without requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import RequestError
from baton.sampling_params import StructuredOutputsParams
from baton.structured.grammars import Grammars
from baton.structured.matcher import Bits, Matcher

# Other matchers are rebuilt from their tokens.
MAX_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class Known:
    """A request's grammar and its output tokens so far (int64)."""

    request_id: str
    grammar: StructuredOutputsParams
    output_ids: npt.NDArray[np.int64]


class DraftMatchers:
    """The drafter's matchers, by request. Not thread-safe."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: OrderedDict[tuple[str, StructuredOutputsParams], Matcher] = OrderedDict()

    def at(self, known: Sequence[Known | None]) -> Constrained:
        """None: a request without a grammar."""
        return Constrained([self._matcher_at(one) if one is not None else None for one in known])

    def _matcher_at(self, known: Known) -> Matcher | None:
        key = known.request_id, known.grammar
        try:
            matcher = self._matchers.pop(key, None) or self._grammars.matcher(known.grammar)
            matcher.advance(known.output_ids.tolist())
        except RequestError:
            return None  # choosing its next token raises the error and ends the request
        self._matchers[key] = matcher
        if len(self._matchers) > MAX_REQUESTS:
            self._matchers.popitem(last=False)
        return matcher


class Constrained:
    """The grammars of a plan's requests while drafts are chosen."""

    def __init__(self, matchers: Sequence[Matcher | None]) -> None:
        self._matchers = list(matchers)

    def bits(self, request: int) -> Bits | None:
        """The allowed tokens for a request's next draft, as `Matcher.bits`; None: all."""
        matcher = self._matchers[request]
        if matcher is None:
            return None
        try:
            return matcher.bits()
        except RequestError:
            self._matchers[request] = None
            return None

    def chose(self, request: int, token: int) -> None:
        """After a draft that ends the output all tokens are allowed: later drafts are not used."""
        matcher = self._matchers[request]
        if matcher is not None and not matcher.consume(token):
            self._matchers[request] = None
