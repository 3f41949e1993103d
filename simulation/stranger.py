"""A process without the ticket key: it hears every frame, and says what it heard again, in connections of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.handoff.channel.base import Connection
from baton.handoff.protocol.frames import decode, kind_of
from baton.handoff.protocol.messages import Bye, Hello
from simulation.network import Network, SimChannel

if TYPE_CHECKING:
    from simulation.world import World

_MAX_SESSIONS, _MAX_FRAMES = 32, 24


@dataclass(slots=True)
class _Nobody:
    """What a channel wants to know of its process."""

    world: World
    name: str = "stranger"
    uid: str = "stranger"
    address: str = "sim://stranger"
    dead: bool = False


class Stranger(SimChannel):
    """May be told HELLO without a descriptor, and BYE. Whatever else it is told, or brings about, is a violation."""

    def __init__(self, world: World, network: Network) -> None:
        nobody: Any = _Nobody(world)
        super().__init__(nobody, network)
        # What dialling engines said, by address and session.
        self._heard: dict[tuple[str, int], list[bytes]] = {}

    def overhear(self, connection: Connection, frame: bytes) -> None:
        """A frame is on its way to an address."""
        said = self._heard.setdefault((connection.address, connection.session), [])
        if len(said) < _MAX_FRAMES:
            said.append(frame)
        if len(self._heard) > _MAX_SESSIONS:
            del self._heard[next(iter(self._heard))]

    def repeat(self) -> bool:
        """Say all of a session again, from its HELLO on; False when there was none."""
        if not self._heard:
            return False
        (address, session), said = self.world.random.choice(list(self._heard.items()))
        self.process.uid = f"stranger#{self.world.events}"
        connection = Connection(session, None, address=address)
        self.dialled.add(connection)
        self.world.note("stranger", f"repeats {len(said)} frames to {address}")
        for frame in said:
            self.network.to_address(self, connection, frame)
        return True

    def answered(self, connection: Connection, frame: bytes) -> None:
        """What an engine tells it."""
        message = decode(frame)[2]
        if not isinstance(message, Bye) and not (isinstance(message, Hello) and message.descriptor is None):
            self.world.fail("stranger", f"{connection.address} tells a stranger {kind_of(message)}")
