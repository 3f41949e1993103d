"""Lockstep of engines that share experts: while one computes, all take part (`models/layers/expert_parallel.py`); while
none does, all sleep.

Turns between two idle periods form a *wave*, with the same number on all ranks. A rank that gets work while all are
idle wakes the others with the wave's number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.errors import ConfigError, EngineUnavailableError

if TYPE_CHECKING:
    from baton.models.layers.expert_parallel import ExpertRanks

log = logging.getLogger(__name__)

_COMPUTED, _STOPS = 1, 2
_WAVE = struct.Struct("<Q")


class Peers(Protocol):
    """Engines that compute with this one. `ended`: a loop that should stop may stop now."""

    ended: bool

    def turn(self, step: Callable[[], bool], stops: bool) -> bool:
        """Whether another turn must follow at once. `stops`: the loop should stop."""
        ...

    def may_sleep(self, stops: bool) -> bool:
        """Whether the next turn may wait until a call is posted."""
        ...

    def close(self) -> None: ...


class SingleRank:
    ended = True

    def turn(self, step: Callable[[], bool], stops: bool) -> bool:
        return step()

    def may_sleep(self, stops: bool) -> bool:
        return not stops

    def close(self) -> None:
        pass


class WakeSockets:
    """Wakes other ranks by datagrams, between Unix sockets in the ranks' directory.

    `last_wave`: the last that another rank sent.
    """

    def __init__(self, directory: str, rank: int, size: int) -> None:
        self.last_wave = -1
        self._directory, self._rank, self._size = Path(directory), rank, size
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._thread: threading.Thread | None = None
        try:
            self._socket.bind(self._path(rank))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                "data_parallel_store", f"cannot make the socket of rank {rank} in {directory}: {error}"
            ) from None

    def _path(self, rank: int) -> str:
        return str(self._directory / f"bell-{rank}")

    def listen(self, woken: Callable[[], None]) -> None:
        """`woken` is called on another thread."""
        self._thread = threading.Thread(target=self._listen, args=(woken,), daemon=True, name="baton-bell")
        self._thread.start()

    def _listen(self, woken: Callable[[], None]) -> None:
        while data := self._socket.recv(_WAVE.size):
            if len(data) == _WAVE.size:
                self.last_wave = max(self.last_wave, *_WAVE.unpack(data))
                woken()

    def wake(self, wave: int) -> None:
        """Raises `EngineUnavailableError` if a rank is gone."""
        for rank in range(self._size):
            if rank == self._rank:
                continue
            try:
                self._socket.sendto(_WAVE.pack(wave), self._path(rank))
            except OSError as error:
                raise EngineUnavailableError(f"data-parallel rank {rank} has gone: {error}") from None

    def close(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(b"", self._path(self._rank))
            self._thread.join()
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path(self._rank))


class Lockstep:
    """One rank's turns. It starts awake, because ranks compute while they are built."""

    def __init__(self, shared: ExpertRanks, wake_sockets: WakeSockets) -> None:
        self.ended = False
        self.shared, self.wake_sockets = shared, wake_sockets
        self._wave, self._awake, self._stop_sent = 0, True, False
        shared.begins = self._begin

    def turn(self, step: Callable[[], bool], stops: bool) -> bool:
        """Returns when all ranks have made their turn. Raises `EngineUnavailableError`."""
        computed = step()
        notifies = stops and not self._stop_sent
        if not (self._awake or self.shared.begun or self._is_woken or notifies):
            return False
        messages = self.shared.finish(_COMPUTED * computed + _STOPS * stops)
        self._stop_sent = stops
        self.ended = all(message & _STOPS for message in messages)
        self._awake = not self.ended and any(message & _COMPUTED for message in messages)
        self._wave += not self._awake
        return self._awake

    def may_sleep(self, stops: bool) -> bool:
        return not self._awake and stops == self._stop_sent and not self.ended

    @property
    def _is_woken(self) -> bool:
        return self.wake_sockets.last_wave >= self._wave

    def _begin(self) -> None:
        if not self._awake and not self._is_woken:
            self.wake_sockets.wake(self._wave)

    def close(self) -> None:
        self.wake_sockets.close()
