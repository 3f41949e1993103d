"""The modelled control network: real frames between the channels of processes, late, twice, never."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from baton.errors import ProtocolError
from baton.handoff.channel.base import Connection
from baton.handoff.protocol.frames import decode, encode, kind_of
from baton.handoff.protocol.messages import Bye, Cancelled, Commit, Confirm, Finished, Hello, Message

if TYPE_CHECKING:
    from simulation.rank import Rank
    from simulation.world import World

_LAST_SEQUENCE = (1 << 63) - 1
_ONE_WAY = (0.0002, 0.002)
# Fields that a trace leaves out: long, or not of the seed.
_UNSAID = ("key", "ticket", "fingerprint", "instance", "challenge", "proof")


class Network:
    """Who listens where, and who cannot reach whom at the moment."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bound: dict[str, Rank] = {}
        self._cut: set[frozenset[str]] = set()  # pairs of names of engines, or of addresses of ranks
        self._healed: dict[frozenset[str], float] = {}  # when such a pair was last cut
        self.overhear: Callable[[Connection, bytes], None] | None = None
        self._last: dict[tuple[int, bool], float] = {}
        self._parked: dict[str, list[tuple[SimChannel, Connection, bytes]]] = {}

    def bind(self, process: Rank) -> None:
        """A process listens; what dialling sockets have kept for its address arrives."""
        self.bound[process.address] = process
        for channel, connection, frame in self._parked.pop(process.address, []):
            self.to_address(channel, connection, frame)

    def unbind(self, process: Rank) -> None:
        """It listens no more."""
        if self.bound.get(process.address) is process:
            del self.bound[process.address]

    # ------------------------------------------------------------ frames under way

    def to_address(self, channel: SimChannel, connection: Connection, frame: bytes) -> None:
        """From a dialling socket to whoever is bound at the address when it arrives."""
        if self.overhear is not None:
            self.overhear(connection, frame)
        self._send((connection.session, True), self._arrive, channel, connection, frame)

    def to_dialler(self, channel: SimChannel, connection: Connection, frame: bytes) -> None:
        """From the listening side back to the socket that dialled."""
        self._send((connection.session, False), self._return, channel, connection, frame)

    def _send(self, lane: tuple[int, bool], arrive: object, *args: object) -> None:
        world = self.world
        assert callable(arrive)
        if world.hit("drop"):
            return
        for _ in range(2 if world.hit("duplicate") else 1):
            delay = world.random.uniform(*_ONE_WAY)
            if world.hit("delay"):
                delay += world.random.choice((0.2, 2.0, 8.0)) * world.random.random()
            if world.hit("reorder"):
                delay += world.random.choice((0.02, 0.2, 1.0)) * world.random.random()
            else:
                # In order behind what was sent before.
                delay = max(delay, self._last.get(lane, 0.0) - world.now + 1e-6)
                self._last[lane] = world.now + delay
            world.after(delay, arrive, *args)

    def cut(self, pair: frozenset[str]) -> None:
        """These two, names of engines or addresses of ranks, do not reach each other from now on."""
        self._cut.add(pair)

    def heal(self, pairs: Iterable[frozenset[str]] | None = None) -> None:
        """These pairs, or all, reach each other again."""
        for pair in list(self._cut) if pairs is None else pairs:
            self._cut.discard(pair)
            self._healed[pair] = self.world.now

    def reached(self, one: Rank, other: Rank, since: float) -> bool:
        """Whether nothing was between these two at any time since then, in virtual seconds."""
        pairs = [frozenset(pair) for pair in product((one.name, one.address), (other.name, other.address))]
        return not any(pair in self._cut or self._healed.get(pair, -1.0) >= since for pair in pairs)

    def _reachable(self, one: Rank, other: Rank) -> bool:
        return not any(
            frozenset(pair) in self._cut for pair in product((one.name, one.address), (other.name, other.address))
        )

    def _arrive(self, sender: SimChannel, connection: Connection, frame: bytes) -> None:
        receiver = self.bound.get(connection.address)
        if connection not in sender.dialled or sender.process.dead:
            return
        if receiver is None:
            # The socket keeps it, and connects again when somebody listens.
            self._parked.setdefault(connection.address, []).append((sender, connection, frame))
        elif self._reachable(sender.process, receiver):
            receiver.channel.accept(sender, connection, frame)

    def _return(self, dialler: SimChannel, connection: Connection, frame: bytes) -> None:
        sender = self.bound.get(connection.address)
        if dialler.process.dead or connection not in dialler.dialled:
            return
        if sender is None or self._reachable(sender, dialler.process):
            dialler.answered(connection, frame)


class SimChannel:
    """A `ControlChannel`: sessions and sequence numbers as the ZeroMQ one has them, on a modelled network.

    In worlds that are not `ordered`, sequence numbers are not looked at, so that the machines see every late and
    doubled message.
    """

    def __init__(self, process: Rank, network: Network) -> None:
        self.process, self.network, self.world = process, network, process.world
        self.address = process.address
        self.malformed = 0
        self.dialled: set[Connection] = set()
        self.routing: list[tuple[Connection, Message]] = []
        self._accepted: dict[bytes, Connection] = {}

    # ------------------------------------------------------------ the ControlChannel protocol

    def dial(self, address: str) -> Connection:
        connection = Connection(self.world.random.getrandbits(62), None, address=address)
        self.dialled.add(connection)
        return connection

    def drop(self, connection: Connection) -> None:
        if connection.identity is not None:
            if self._accepted.get(connection.identity) is connection:
                del self._accepted[connection.identity]
        else:
            self.dialled.discard(connection)

    def send(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Commit | Confirm) and self.world.hit("corrupt_seeds"):
            seeds = msgspec.structs.replace(message.seeds, first_token=message.seeds.first_token ^ 1)
            message = msgspec.structs.replace(message, seeds=seeds)
        last = isinstance(message, Bye)
        frame = encode(message, connection.session, _LAST_SEQUENCE if last else connection.sent + 1)
        connection.sent += 1
        if self.world.tracing:
            self._note(connection, message)
        if isinstance(message, Commit | Confirm | Finished | Cancelled):
            self.process.vouches(message)
        if connection.identity is None:
            self.network.to_address(self, connection, frame)
        else:
            dialler, dialled = connection.socket
            self.network.to_dialler(dialler, dialled, frame)
        if isinstance(message, Hello) and self.world.hit("stop_after_hello"):
            self.world.after(0.0, self.process.process.stop_for_a_while)

    def wake(self) -> None:
        self.process.wake()

    def _note(self, connection: Connection, message: Message) -> None:
        key = getattr(message, "key", None)
        far = connection.address or connection.socket[0].process.name
        what = {k: v for k, v in _fields(message).items() if k not in _UNSAID}
        self.world.note(self.process.name, f"sends {kind_of(message)} {_short(key)} to {far} {what}")

    # ------------------------------------------------------------ arriving frames

    def accept(self, sender: SimChannel, dialled: Connection, frame: bytes) -> None:
        """A frame at the listening socket."""
        identity = f"{sender.process.uid}/{dialled.session}".encode()
        session, sequence, message = decode(frame)
        connection = self._accepted.get(identity)
        if connection is None:
            if not isinstance(message, Hello):
                if not isinstance(message, Bye):
                    bye = encode(Bye("unknown_session"), session, _LAST_SEQUENCE)
                    self.network.to_dialler(sender, dialled, bye)
                return
            connection = self._accepted[identity] = Connection(session, (sender, dialled), identity)
        self._take(connection, sequence, message)

    def answered(self, connection: Connection, frame: bytes) -> None:
        """A frame at a socket that dialled."""
        try:
            _, sequence, message = decode(frame)
        except ProtocolError:
            self.malformed += 1
            return
        if isinstance(message, Hello):
            connection.received = 0
        self._take(connection, sequence, message)

    def _take(self, connection: Connection, sequence: int, message: Message) -> None:
        if self.world.settings.ordered and sequence <= connection.received:
            return
        connection.received = max(connection.received, sequence)
        self.routing.append((connection, message))
        self.process.wake()


def _short(key: object) -> str:
    return "" if key is None else str(key)[:6] + str(key)[32:]


def _fields(message: Message) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}
