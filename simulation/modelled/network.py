"""The modelled control network: real frames between the real channels, delivered late, twice or never."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from baton.handoff.protocol.frames import kind_of
from baton.handoff.protocol.messages import Cancelled, Commit, Confirm, ControlMessage, Finished, Hello
from baton.handoff.session.accepted import AcceptedConnections
from baton.handoff.session.addresses import ControlEndpoint
from baton.handoff.session.base import Connection
from baton.handoff.session.dialled import DialMonitors
from baton.handoff.session.sockets import Channel
from simulation.modelled.sockets import Parts, SimContext, SimPoller, SimSocket

if TYPE_CHECKING:
    from simulation.rank import Rank
    from simulation.world import World

_ONE_WAY = (0.0002, 0.002)
_ACCEPT_AGAIN_S = 0.3
# Fields that a trace omits: long, or not determined by the seed.
_UNSAID = ("key", "ticket", "fingerprint", "instance", "challenge", "proof")


class Network:
    """Who listens where, and which pairs cannot reach each other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bound: dict[str, Rank] = {}
        self._cut: set[frozenset[str]] = set()  # pairs of engine names, or of rank addresses
        self._healed: dict[frozenset[str], float] = {}  # when such a pair was last cut
        self.overhear: Callable[[SimSocket, Parts], None] | None = None
        self._last: dict[tuple[int, bool], float] = {}
        self._parked: dict[str, list[tuple[SimSocket, Parts]]] = {}
        self._dealers: dict[str, list[SimSocket]] = {}  # by the address that they dialled
        self._sockets = 0

    def socket(self, channel: SimChannel) -> SimSocket:
        self._sockets += 1
        return SimSocket(self, channel, self._sockets)

    def identity_for(self, dealer: SimSocket) -> bytes:
        """The identity under which the ROUTER at its address will know a new connection. Sometimes it is the identity
        of a closed connection, as a client may claim it.
        """
        known = self._dealers.setdefault(dealer.address, [])
        over = [other for other in known if other.gone]
        known.append(dealer)
        if over and self.world.hit("claimed_id"):
            claimed = self.world.random.choice(over)
            known.remove(claimed)
            return claimed.identity
        return dealer.identity

    def bind(self, process: Rank) -> None:
        """A process listens; messages that dialling sockets kept for its address arrive."""
        self.bound[process.address] = process
        for dealer, parts in self._parked.pop(process.address, []):
            self.to_address(dealer, parts)

    def unbind(self, process: Rank) -> None:
        if self.bound.get(process.address) is process:
            del self.bound[process.address]

    # ------------------------------------------------------------ frames in flight

    def to_address(self, dealer: SimSocket, parts: Parts) -> None:
        """Send from a dialling socket to the process that is bound to the address when the message arrives."""
        if self.overhear is not None:
            self.overhear(dealer, parts)
        self._send(dealer.channel.process, (dealer.number, True), self._arrive, dealer, parts)

    def to_dialler(self, sender: Rank, dealer: SimSocket, parts: Parts) -> None:
        """Send from the listening side back to the socket that dialled."""
        self._send(sender, (dealer.number, False), self._return, dealer, parts)

    def _send(self, sender: Rank, lane: tuple[int, bool], arrive: object, *args: object) -> None:
        world = self.world
        assert callable(arrive)
        if world.hit("drop"):
            return
        for _ in range(2 if world.hit("duplicate") else 1):
            # A sender that has spent time in this turn sends that much later.
            delay = sender.spent + world.random.uniform(*_ONE_WAY)
            if world.hit("delay"):
                delay += world.random.choice((0.2, 2.0, 8.0)) * world.random.random()
            if world.hit("reorder"):
                delay += world.random.choice((0.02, 0.2, 1.0)) * world.random.random()
            else:
                # In order after earlier messages.
                delay = max(delay, self._last.get(lane, 0.0) - world.now + 1e-6)
                self._last[lane] = world.now + delay
            world.after(delay, arrive, *args)

    def cut(self, pair: frozenset[str]) -> None:
        """Two engines (names) or ranks (addresses) cannot reach each other from now on."""
        self._cut.add(pair)

    def heal(self, pairs: Iterable[frozenset[str]] | None = None) -> None:
        for pair in list(self._cut) if pairs is None else pairs:
            self._cut.discard(pair)
            self._healed[pair] = self.world.now

    def reached(self, one: Rank, other: Rank, since: float) -> bool:
        """Whether these two could reach each other all the time since `since` (virtual seconds)."""
        pairs = [frozenset(pair) for pair in product((one.name, one.address), (other.name, other.address))]
        return not any(pair in self._cut or self._healed.get(pair, -1.0) >= since for pair in pairs)

    def _reachable(self, one: Rank, other: Rank) -> bool:
        return not self._cut or not any(
            frozenset(pair) in self._cut for pair in product((one.name, one.address), (other.name, other.address))
        )

    def _arrive(self, dealer: SimSocket, parts: Parts) -> None:
        receiver = self.bound.get(dealer.address)
        if dealer.gone:
            return
        if receiver is None:
            # The socket keeps the message, and reconnects when a process listens.
            self._parked.setdefault(dealer.address, []).append((dealer, parts))
        elif self._reachable(dealer.channel.process, receiver):
            receiver.channel.accept(dealer, parts)

    def _return(self, dealer: SimSocket, parts: Parts) -> None:
        sender = self.bound.get(dealer.address)
        if not dealer.gone and (sender is None or self._reachable(sender, dealer.channel.process)):
            dealer.channel.answered(dealer, parts)


_RENEW = b"RENEW"  # the tag of its frames


class _NoMonitors(DialMonitors):
    """The modelled network refuses no connection: an address where nobody listens is silent."""

    def add(self, sock: Any, connection: Connection) -> None: ...


class SimChannel(Channel):
    """The real channel, with its sessions, seals and sequence numbers, over modelled sockets.

    In worlds that are not `ordered`, sequence numbers are ignored, so that the state machines see every late and
    duplicated message.
    """

    def __init__(self, process: Rank, network: Network) -> None:
        self.process, self.world = process, process.world
        self.address = process.address
        self.frames = self.malformed = self.dropped = 0
        keys: Any = SimpleNamespace(engine_id=None, public=b"", secret=b"")
        self._keys, self._named = keys, False
        context: Any = SimContext(network, self)
        gate: Any = SimpleNamespace(sockets=(), refused=0)
        nobody: Any = SimpleNamespace(fileno=lambda: -1)
        self._context, self._gate, self._wake_out = context, gate, nobody
        poller: Any = SimPoller()
        self._poller = poller
        self._router: SimSocket = network.socket(self)
        poller.register(self._router)
        self._accepted, self._dialled = AcceptedConnections(), {}
        self._monitors = _NoMonitors(context, poller)
        self._unaccepted: dict[SimSocket, list[Parts]] = {}

    def _endpoint(self, address: str) -> ControlEndpoint:
        return ControlEndpoint(None, address, b"")

    def send(self, connection: Connection, message: ControlMessage) -> None:
        if isinstance(message, Commit | Confirm) and self.world.hit("corrupt_seeds"):
            seeds = msgspec.structs.replace(message.seeds, first_token=message.seeds.first_token ^ 1)
            message = msgspec.structs.replace(message, seeds=seeds)
        if self.world.tracing:
            self._note(connection, message)
        if isinstance(message, Commit | Confirm | Finished | Cancelled):
            self.process.vouches(message)
        super().send(connection, message)
        if isinstance(message, Hello) and self.world.hit("stop_after_hello"):
            self.world.after(0.0, self.process.process.stop_for_a_while)

    def wake(self) -> None:
        self.process.wake()

    def _note(self, connection: Connection, message: ControlMessage) -> None:
        key = getattr(message, "key", None)
        dealer = None if connection.identity is None else self._router.peers.get(connection.identity)
        far = connection.address or (dealer.channel.process.name if dealer is not None else "nobody")
        what = {k: v for k, v in _fields(message).items() if k not in _UNSAID}
        self.world.note(self.process.name, f"sends {kind_of(message)} {_short(key)} to {far} {what}")

    # ------------------------------------------------------------ arriving frames

    @property
    def unread(self) -> bool:
        poller: Any = self._poller
        return bool(poller.readable)

    @property
    def may_begin(self) -> bool:
        """Whether an unread message may begin something: all but RENEW, of which a slow rank always has one."""
        poller: Any = self._poller
        return any(not any(_RENEW in part for part in parts) for parts in poller.unread())

    def accept(self, dealer: SimSocket, parts: Parts) -> None:
        """A message arrives at the listening socket. ZeroMQ keeps those of a connection that it cannot accept yet."""
        if dealer in self._unaccepted:
            self._unaccepted[dealer].append(parts)
            return
        if dealer.identity not in self._router.peers and self.world.short():
            self._unaccepted[dealer] = [parts]
            self.world.after(_ACCEPT_AGAIN_S, self._accept_late, dealer)
            return
        self._router.peers[dealer.identity] = dealer
        self._router.inbox.append((dealer, [dealer.identity, *parts]))
        self.process.wake()

    def _accept_late(self, dealer: SimSocket) -> None:
        waiting = self._unaccepted.pop(dealer)
        if dealer.gone or self.process.dead:
            return
        for parts in waiting:
            self.accept(dealer, parts)

    def answered(self, dealer: SimSocket, parts: Parts) -> None:
        """A message arrives at a socket that dialled."""
        dealer.inbox.append((dealer, parts))
        self.process.wake()

    def _accept(self, parts: list[Any]) -> list[tuple[Connection, ControlMessage]]:
        found = super()._accept(parts)
        for connection, _ in found[-1:]:  # those before it are sessions that this message ends
            session = self.process.handoffs.sessions.clients.get(connection)
            sender = self._router.last.channel.process
            if (
                session is not None
                and session.hello is not None
                and not sender.uid.startswith(session.hello.incarnation)
            ):
                told = f"a message of {sender.uid} counts as one of {session.hello.incarnation}"
                self.world.fail("wrong_session", f"{self.process.uid}: {told}")
        return found

    def _in_order(
        self, connection: Connection, sequence: int, message: ControlMessage
    ) -> list[tuple[Connection, ControlMessage]]:
        if self.world.settings.ordered:
            return super()._in_order(connection, sequence, message)
        return [(connection, message)]


def _short(key: object) -> str:
    return "" if key is None else str(key)[:6] + str(key)[32:]


def _fields(message: ControlMessage) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}
