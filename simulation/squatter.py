"""Whoever listens at the address of a dead engine: it has no ticket key, and answers as it likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from baton.handoff.channel.base import Connection
from baton.handoff.protocol.frames import decode, encode
from baton.handoff.protocol.messages import Bye

if TYPE_CHECKING:
    from simulation.network import Network, SimChannel
    from simulation.world import World

Manner = Literal["bye", "silent", "garbage", "echo"]
_LAST_SEQUENCE = (1 << 63) - 1


class Squatter:
    """One listener. It takes the place of a rank in the network, and is its own channel."""

    def __init__(self, world: World, network: Network, address: str) -> None:
        self.world, self.network, self.address = world, network, address
        self.name = self.uid = f"squatter at {address}"
        self.dead = False
        self.channel = self
        self.manner: Manner = world.random.choice(get_args(Manner))

    def accept(self, sender: SimChannel, dialled: Connection, frame: bytes) -> None:
        """A frame of an engine that dialled the address. To others without the key there is nothing to say."""
        if sender.process.name == "stranger":
            return
        session = decode(frame)[0]
        if self.manner == "bye":
            answer = encode(Bye("unknown_session"), session, _LAST_SEQUENCE)
        elif self.manner == "garbage":
            answer = self.world.random.randbytes(self.world.random.randrange(200))
        elif self.manner == "echo":
            answer = frame
        else:
            return
        self.network.to_dialler(sender, dialled, answer)
