"""Lockstep of engines that share experts: while one of them computes, all take part in its rounds
(`models.expert_parallel`); while none does, all sleep. The core itself knows only `Peers`.

Turns between two idle periods form a *wave*, numbered alike on all ranks. A rank that gets work while all are idle
rings for the others with the wave's number. A ring for a wave that is over wakes nobody.
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
    """Other engines that compute with this one. `ended`: a loop that was told to stop may stop now."""

    ended: bool

    def turn(self, step: Callable[[], bool], stops: bool) -> bool:
        """Run a step. Returns whether another turn must follow at once. `stops`: the loop was told to stop."""
        ...

    def may_sleep(self, stops: bool) -> bool:
        """Whether the next turn may wait until a call is posted."""
        ...

    def close(self) -> None:
        """Close what ranks wake each other with."""
        ...


class Alone:
    """An engine that shares no experts."""

    ended = True

    def turn(self, step: Callable[[], bool], stops: bool) -> bool:
        return step()

    def may_sleep(self, stops: bool) -> bool:
        return not stops

    def close(self) -> None:
        pass


class Bells:
    """Wakes other ranks by datagrams, between Unix sockets in the ranks' directory.

    `heard`: the last wave that was rung for, -1 before the first.
    """

    def __init__(self, directory: str, rank: int, size: int) -> None:
        self.heard = -1
        self._directory, self._rank, self._size = Path(directory), rank, size
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._thread: threading.Thread | None = None
        try:
            self._socket.bind(self._bell(rank))
        except OSError as error:
            self._socket.close()
            raise ConfigError("data_parallel_store", f"{directory} has no room for rank {rank}: {error}") from None

    def _bell(self, rank: int) -> str:
        return str(self._directory / f"bell-{rank}")

    def listen(self, woken: Callable[[], None]) -> None:
        """From now on call `woken`, on another thread, when another rank rings."""
        self._thread = threading.Thread(target=self._listen, args=(woken,), daemon=True, name="baton-bell")
        self._thread.start()

    def _listen(self, woken: Callable[[], None]) -> None:
        while data := self._socket.recv(_WAVE.size):
            if len(data) == _WAVE.size:
                self.heard = max(self.heard, *_WAVE.unpack(data))
                woken()

    def ring(self, wave: int) -> None:
        """Wake the others. Raises `EngineUnavailableError` if one is gone."""
        for rank in range(self._size):
            if rank == self._rank:
                continue
            try:
                self._socket.sendto(_WAVE.pack(wave), self._bell(rank))
            except OSError as error:
                raise EngineUnavailableError(f"data-parallel rank {rank} has gone: {error}") from None

    def close(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(b"", self._bell(self._rank))
            self._thread.join()
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._bell(self._rank))


class Lockstep:
    """One rank's turns. It starts awake, because ranks compute while they are built, each when it gets there."""

    def __init__(self, shared: ExpertRanks, bells: Bells) -> None:
        self.ended = False
        self.shared, self.bells = shared, bells
        self._wave, self._awake, self._told = 0, True, False
        shared.begins = self._begin

    def turn(self, step: Callable[[], bool], stops: bool) -> bool:
        """As `Peers.turn`. Returns when all ranks have made their turn. Raises `EngineUnavailableError` if one is
        gone."""
        computed = step()
        news = stops and not self._told
        if not (self._awake or self.shared.begun or self._is_called or news):
            return False
        words = self.shared.finish(_COMPUTED * computed + _STOPS * stops)
        self._told = stops
        self.ended = all(word & _STOPS for word in words)
        self._awake = not self.ended and any(word & _COMPUTED for word in words)
        self._wave += not self._awake
        return self._awake

    def may_sleep(self, stops: bool) -> bool:
        return not self._awake and stops == self._told and not self.ended

    @property
    def _is_called(self) -> bool:
        return self.bells.heard >= self._wave

    def _begin(self) -> None:
        if not self._awake and not self._is_called:
            self.bells.ring(self._wave)

    def close(self) -> None:
        self.bells.close()
