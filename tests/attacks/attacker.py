"""An attacker (a raw socket that sends anything), and engines without models as its targets."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import msgspec
import zmq

from baton.handoff.protocol.frames import decode_frame, encode_frame
from baton.handoff.protocol.handshake import prove, seal, session_key
from baton.handoff.protocol.messages import CHALLENGE_BYTES, ControlMessage, Hello
from baton.handoff.protocol.ticket import SignedTicket, sign_ticket
from baton.handoff.session.curve import as_client
from baton.handoff.session.keys import KeyRing, TicketKeys, make_keys
from simulation.fuzz.pair import Node, Traffic, attacked, make_ticket

TICKET_KEY = b"k" * 32
KEYS = TicketKeys(TICKET_KEY)
CHALLENGE = bytes(CHALLENGE_BYTES)
Kinds = type[ControlMessage] | tuple[type[ControlMessage], ...]


class Attacker:
    """One connection, with its own keys or those of the ticket key. `session` and `sequence` are free to choose."""

    def __init__(self, address: str, pair: tuple[bytes, bytes] | None = None, server: bytes | None = None) -> None:
        self.context = zmq.Context()
        self.sock = self.context.socket(zmq.DEALER)
        self.sock.setsockopt(zmq.LINGER, 0)
        self.sock.set_hwm(0)  # a connection that exists takes every frame
        if pair is not None and server is not None:
            self.sock.curve_publickey, self.sock.curve_secretkey = pair
            self.sock.curve_serverkey = server
        elif server is None:
            as_client(self.sock, KEYS, KEYS.public)
        self.address = address
        self.sock.connect(address.replace("curve://P@", "tcp://"))
        self.session, self.sequence = random.getrandbits(62), 0
        self.key = b""

    def say(self, *messages: ControlMessage) -> None:
        for message in messages:
            self.sequence += 1
            self.send(encode_frame(message, self.session, self.sequence))

    def send(self, frame: bytes) -> None:
        # A connection that the listener has refused already takes no frame: a send that waits would never return.
        with contextlib.suppress(zmq.Again):
            parts = [frame, seal(self.key, "dialled", frame)] if self.key else [frame]
            self.sock.send_multipart(parts, zmq.DONTWAIT)

    def join(self, hello: Hello, key: bytes = TICKET_KEY) -> Hello:
        """Open a session with knowledge of the ticket key. Returns the last answer."""
        self.say(msgspec.structs.replace(hello, proof=b"", descriptor=None))
        answer = self.hear(Hello)
        assert isinstance(answer, Hello)
        self.say(prove(key, "dialled", self.address, answer.challenge, hello))
        answer = self.hear(Hello)
        assert isinstance(answer, Hello)
        self.key = session_key(key, hello.challenge, answer.challenge)
        return answer

    def hear(self, kind: Kinds, limit_s: float = 30.0) -> ControlMessage:
        deadline = time.monotonic() + limit_s
        while self.sock.poll(max(0.0, deadline - time.monotonic()) * 1000):
            message = decode_frame(self.sock.recv_multipart()[0])[2]
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind} came")

    def hears_nothing(self, kind: Kinds, for_s: float = 0.3) -> bool:
        try:
            self.hear(kind, for_s)
        except AssertionError:
            return True
        return False

    def close(self) -> None:
        self.sock.close(0)
        self.context.term()


class Scene:
    """P and D, legitimate traffic between them, and attackers."""

    def __init__(self, keys: Path | None) -> None:
        self.keys = keys
        self.nodes: list[Node] = []
        self.attackers: list[Attacker] = []
        self.p, self.d = self.node("P"), self.node("D")
        self.traffic = Traffic(self.p, self.d, TICKET_KEY)

    def node(self, name: str) -> Node:
        ring = None
        if self.keys is not None:
            make_keys(self.keys, [name])
            ring = KeyRing(self.keys, name)
        self.nodes.append(attacked(name, TICKET_KEY, ring))
        return self.nodes[-1]

    def attacker(self, node: Node | None = None, pair: tuple[bytes, bytes] | None = None) -> Attacker:
        server = None if self.keys is None else KeyRing(self.keys, "P").public
        made = Attacker((node or self.p).agent.address, pair, server)
        self.attackers.append(made)
        return made

    def ticket(self, **changes: object) -> SignedTicket:
        ticket = msgspec.structs.replace(make_ticket(self.p, self.d, "push", life_s=60), **changes)
        return SignedTicket.of(ticket, sign_ticket(TICKET_KEY, ticket))

    def as_d(self, **changes: object) -> Hello:
        return msgspec.structs.replace(self.d.hello, **changes)

    def close(self) -> None:
        for attacker in self.attackers:
            attacker.close()
        for node in self.nodes:
            node.close()
