"""Stop strings over a stream of text: a match may span pieces, and none of it may be shown too early."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Finds the first stop string in one growing text, holding back what may become one."""

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the text ends after the stop string instead of before it."""
        self._stop = tuple(stop)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, armed: bool = True) -> str:
        """Add text and return what may be shown.

        Sets `matched` when a stop string is complete; then stop pushing.

        With `armed=False` (fewer than min_tokens so far) complete stop strings pass as ordinary text.
        """
        if not self._stop:
            return piece
        text = self._held + piece
        if armed and piece:
            # The earliest start wins; at the same start, the first in the client's order.
            found = [(at, order) for order, s in enumerate(self._stop) if (at := text.find(s)) >= 0]
            if found:
                at, order = min(found)
                self.matched = self._stop[order]
                self._held = ""
                return text[: at + len(self.matched)] if self._include else text[:at]
        keep = self._num_pending(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back; for the end of the sequence without a match."""
        held, self._held = self._held, ""
        return held

    def _num_pending(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins some stop string."""
        longest = min(len(text), max(len(s) for s in self._stop) - 1)
        for size in range(longest, 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop if len(s) > size):
                return size
        return 0
