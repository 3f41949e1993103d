"""The connections that other engines dialled."""

from __future__ import annotations

from baton.errors import ProtocolError
from baton.handoff.session.base import Connection

MAX_SESSIONS = 1024
# Beyond this, a new session of an unproven peer evicts the oldest.
MAX_UNPROVEN = 128


class AcceptedConnections:
    """Accepted connections by ZeroMQ identity. Not thread-safe. `evicted`: how many were closed to make room."""

    def __init__(self) -> None:
        self._all: dict[bytes, Connection] = {}
        self._unproven: dict[bytes, Connection] = {}
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_unproven(self) -> int:
        return len(self._unproven)

    def get(self, identity: bytes) -> Connection | None:
        return self._all.get(identity)

    def add(self, identity: bytes, connection: Connection) -> None:
        self._all[identity] = self._unproven[identity] = connection

    def drop(self, identity: bytes, connection: Connection) -> None:
        if self._all.get(identity) is connection:
            del self._all[identity]
            self._unproven.pop(identity, None)

    def make_room(self, identity: bytes) -> list[Connection]:
        """Drop and return the connections that a new one of this peer replaces or evicts.

        Raises `ProtocolError` if all are proven, so that there is no room.
        """
        gone = [connection for connection in [self._all.get(identity)] if connection is not None]
        if not gone and self._is_full():
            self._unproven = {key: other for key, other in self._unproven.items() if not other.proven}
            if self._is_full():
                if not self._unproven:
                    raise ProtocolError(f"{len(self._all)} engines have sessions here, and no more fit")
                gone.append(next(iter(self._unproven.values())))
                self.evicted += 1
        for connection in gone:
            assert connection.identity is not None
            self.drop(connection.identity, connection)
        return gone

    def _is_full(self) -> bool:
        return len(self._unproven) >= MAX_UNPROVEN or len(self._all) >= MAX_SESSIONS
