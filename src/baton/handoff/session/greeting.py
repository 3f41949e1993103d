"""One rank's HELLO, and its checks of a peer: proof, engine, and tickets."""

from __future__ import annotations

import msgspec

from baton.clock import Clock
from baton.errors import ProtocolError
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.fingerprint import check_pair, compare_fingerprints, geometry_fields, target_groups
from baton.handoff.protocol.gather import LEAD, pairs_with
from baton.handoff.protocol.handshake import Side, is_proven, prove, session_key
from baton.handoff.protocol.messages import CHALLENGE_BYTES, Announce, Hello, Pair, Register
from baton.handoff.protocol.ticket import SignedTicket, verify_ticket
from baton.handoff.session.base import Connection
from baton.handoff.session.config import AgentConfig
from baton.handoff.session.session import Session


class Greeting:
    """Not thread-safe. `gathered`: as of `Sessions`. `hello`: without challenge and proof."""

    def __init__(
        self, config: AgentConfig, instance: Instance, descriptor: bytes, clock: Clock, gathered: bool
    ) -> None:
        facts = {**config.fingerprint, "handoff.integrity": config.integrity}
        self.hello = Hello(config.engine_id, config.incarnation, facts, instance, bytes(CHALLENGE_BYTES))
        self._config = config
        self._descriptor = descriptor
        self._clock = clock
        self._fields = {**facts, **geometry_fields(instance)}
        self._gathered = gathered

    def own_hello(self, connection: Connection, with_descriptor: bool) -> Hello:
        descriptor = self._descriptor if with_descriptor else None
        return msgspec.structs.replace(self.hello, challenge=connection.challenge, descriptor=descriptor)

    def with_proof(self, side: Side, address: str, challenge: bytes, hello: Hello) -> Hello:
        """`challenge`: the peer's. `address`: the dialled one."""
        return prove(self._config.ticket_key, side, address, challenge, hello)

    def is_proven(self, side: Side, address: str, connection: Connection, hello: Hello) -> bool:
        return is_proven(self._config.ticket_key, side, address, connection.challenge, hello)

    def session_key(self, dialler: bytes, listener: bytes) -> bytes:
        return session_key(self._config.ticket_key, dialler, listener)

    def agree(self, session: Session, hello: Hello) -> None:
        """Sets the session's groups and pairs.

        Raises `IncompatiblePeerError`, and another `BatonError` for a HELLO that contradicts itself.
        """
        session.hello = hello
        own = self.hello.instance
        if not compare_fingerprints(self._fields, {**hello.fingerprint, **geometry_fields(hello.instance.check())}):
            own = own.only(target_groups(own))
            session.hello = msgspec.structs.replace(hello, instance=hello.instance.only(target_groups(hello.instance)))
            session.groups = frozenset(own.groups)
        session.pairs = self._pairs(own, session.hello.instance, dialled=session.connection.identity is None)

    def _pairs(self, here: Instance, peer: Instance, dialled: bool) -> dict[Pair, frozenset[str]]:
        if self._gathered:
            return pairs_with(here, peer, sends=not dialled)
        check_pair(here, peer)
        return {LEAD: frozenset(here.groups)}

    def check_claim(self, session: Session, message: Announce | Register) -> SignedTicket:
        """Raises `ProtocolError`."""
        config, hello = self._config, session.hello
        if hello is None or session.refusal is not None:
            raise ProtocolError(session.refusal[1] if session.refusal else "a session begins with HELLO")
        ticket = verify_ticket(config.ticket_key, message.ticket, "prefill", self._clock.monotonic())
        if ticket.key.of_pair(message.key.pair) != message.key:
            raise ProtocolError("the ticket is for another attempt")
        if message.key.pair not in session.pairs:
            raise ProtocolError(f"ranks {message.key.pair} have nothing to hand over")
        named = (ticket.prefill_addresses, self.hello), (ticket.decode_addresses, hello)
        if any(len(addresses) != side.instance.num_ranks for addresses, side in named):
            raise ProtocolError("the ticket does not name each rank once")
        if (ticket.prefill_engine, ticket.prefill_incarnation) != (config.engine_id, config.incarnation):
            raise ProtocolError("the ticket names another prefill engine")
        if (ticket.decode_engine, ticket.decode_incarnation) != (hello.engine_id, hello.incarnation):
            raise ProtocolError("the ticket names another decode engine")
        return ticket
