"""A process without the ticket key: it overhears every frame, and replays them in connections of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.handoff.protocol.frames import decode_frame, kind_of
from baton.handoff.protocol.messages import Bye, Hello
from simulation.modelled.network import Network, SimChannel
from simulation.modelled.sockets import Parts, SimSocket

if TYPE_CHECKING:
    from simulation.world import World

_MAX_SESSIONS, _MAX_FRAMES = 32, 24
_GARBAGE = 0.3


@dataclass(slots=True)
class _Nobody:
    """The part of a process that a channel uses."""

    world: World
    name: str = "stranger"
    uid: str = "stranger"
    address: str = "sim://stranger"
    dead: bool = False
    spent: float = 0.0


class Stranger(SimChannel):
    """It may receive HELLO without a descriptor, and BYE. Any other message to it, or any effect of it, is a
    violation.
    """

    def __init__(self, world: World, network: Network) -> None:
        nobody: Any = _Nobody(world)
        super().__init__(nobody, network)
        self._network = network
        # Messages of dialling engines, by socket.
        self._heard: dict[SimSocket, list[Parts]] = {}

    def overhear(self, dealer: SimSocket, parts: Parts) -> None:
        said = self._heard.setdefault(dealer, [])
        if len(said) < _MAX_FRAMES:
            said.append(parts)
        if len(self._heard) > _MAX_SESSIONS:
            del self._heard[next(iter(self._heard))]

    def repeat(self) -> bool:
        """Replay a whole session from its HELLO on, some of it garbled or with extra parts. Returns False if there is
        none.
        """
        if not self._heard:
            return False
        random = self.world.random
        dealer, said = random.choice(list(self._heard.items()))
        own = self._network.socket(self)
        own.identity = b"stranger#%d" % self.world.events
        own.address = dealer.address
        self.world.note("stranger", f"repeats {len(said)} frames to {own.address}")
        for parts in list(said):
            if random.random() < _GARBAGE:
                parts = random.choice(([b""], [*parts, *parts, b"more"], [random.randbytes(40)], [parts[0][:-1]]))
            self._network.to_address(own, parts)
        return True

    def answered(self, dealer: SimSocket, parts: Parts) -> None:
        message = decode_frame(parts[0])[2]
        if not isinstance(message, Bye) and not (isinstance(message, Hello) and message.descriptor is None):
            self.world.fail("stranger", f"{dealer.address} tells a stranger {kind_of(message)}")
