"""A listener at the address of a dead engine. It has no ticket key, and answers in one of several ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from baton.handoff.protocol.frames import decode_frame, encode_frame
from baton.handoff.protocol.messages import Bye
from simulation.modelled.sockets import Parts, SimSocket

if TYPE_CHECKING:
    from simulation.modelled.network import Network
    from simulation.world import World

Manner = Literal["bye", "silent", "garbage", "echo", "parts", "engine"]
_LAST_SEQUENCE = (1 << 63) - 1
# An engine that redials an address may send at most `_SPAN` messages per `_SHORTEST_S` virtual seconds.
_SPAN, _SHORTEST_S = 200, 1.0


class Squatter:
    """One listener. It takes the place of a rank in the network, and is its own channel."""

    def __init__(self, world: World, network: Network, address: str) -> None:
        self.world, self.network, self.address = world, network, address
        self.name = self.uid = f"squatter at {address}"
        self.dead = False
        self.spent = 0.0
        self.channel = self
        self.manner: Manner = world.random.choice(get_args(Manner))
        self._asked: dict[str, list[float]] = {}  # times of messages, by sender

    def accept(self, dealer: SimSocket, parts: Parts) -> None:
        """A message of an engine that dialled the address. Strangers get no answer."""
        process = dealer.channel.process
        if process.name == "stranger":
            return
        asked = self._asked.setdefault(process.uid, [])
        asked.append(self.world.now)
        if len(asked) > _SPAN and asked[-1] - asked[-_SPAN] < _SHORTEST_S:
            self.world.fail("flood", f"{process.uid} asks whoever is at {self.address} {_SPAN} times within a second")
        if self.manner == "bye":
            answer = [encode_frame(Bye("unknown_session"), decode_frame(parts[0])[0], _LAST_SEQUENCE)]
        elif self.manner == "garbage":
            answer = [self.world.random.randbytes(self.world.random.randrange(200))]
        elif self.manner == "echo":
            answer = parts
        elif self.manner == "engine":
            # Another engine with the ticket key listens here: it proves itself for its own address.
            bound = [rank for at, rank in self.network.bound.items() if at != self.address]
            others = [rank for rank in bound if not isinstance(rank, Squatter)]
            if others:
                others[0].channel.accept(dealer, parts)
            return
        elif self.manner == "parts":
            answer = [*parts * self.world.random.randint(2, 40)]
        else:
            return
        self.network.to_dialler(self, dealer, answer)  # type: ignore[arg-type]
