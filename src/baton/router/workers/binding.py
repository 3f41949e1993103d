"""The model that the first request in any process binds all processes of a router to."""

from __future__ import annotations

import hashlib
import mmap

from baton.comparison import token_identity
from baton.wire import EngineInfo

_NUM_CELLS, _CELL_BYTES = 2, 8


class SharedBinding:
    """Memory that all processes map. Create it before they are forked. `key`: see `binding_key`, 0 if none is bound.
    `max_model_len`: the served context, in tokens.

    If two processes bind at once, the last wins, and the other sees that `key` is not its own.
    """

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, _NUM_CELLS * _CELL_BYTES)).cast("q")

    @property
    def key(self) -> int:
        return self._cells[0]

    @property
    def max_model_len(self) -> int:
        return self._cells[1]

    def bind(self, key: int, max_model_len: int) -> None:
        """Without effect if a model is bound."""
        if not self.key:
            self._cells[1] = max_model_len
            self._cells[0] = key

    def clear(self) -> None:
        self._cells[0] = self._cells[1] = 0


def binding_key(info: EngineInfo) -> int:
    """Equal for engines that give the same tokens under the same name. Never 0."""
    decisive = repr((info.model, info.vocab_size, info.default_seed, token_identity(info.fingerprint)))
    return int.from_bytes(hashlib.blake2b(decisive.encode(), digest_size=_CELL_BYTES).digest(), "big") >> 1 | 1
