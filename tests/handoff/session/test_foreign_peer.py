"""A decode engine written from docs/protocol.md alone: of Baton it uses only P, and D's memory with its transport."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zmq
from zmq.utils import z85

from baton.handoff.protocol.events import PrefillReleased
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.ticket import verify_ticket
from simulation.fuzz.pair import GROUPS, NUM_PAGES, Node

TICKET_KEY, VERSION, LAST = b"t" * 32, 8, 2**63 - 1
NUM_TOKENS = 70
SEEDS = Seeds(first_token=5, draft_token_ids=[6, 7])
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
Body = dict[str, Any]


def mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)


def in_order(table: Body) -> Body:
    return dict(sorted(table.items()))


class ForeignDecoder:
    """One session with P."""

    def __init__(self, address: str, descriptor: bytes) -> None:
        self.address, self.descriptor, self.key = address, descriptor, b""
        self.incarnation, self.challenge = "foreign-1", os.urandom(16)
        self.session, self.sent, self.received = int.from_bytes(os.urandom(7), "big"), 0, 0
        self.context = zmq.Context()
        self.sock = self.context.socket(zmq.DEALER)
        secret = z85.encode(mac(TICKET_KEY, b"baton control socket\0"))
        self.sock.curve_secretkey = secret
        self.sock.curve_publickey = self.sock.curve_serverkey = zmq.curve_public(secret)
        self.sock.connect(address)

    def seal(self, side: bytes, frame: bytes) -> list[bytes]:
        return [mac(self.key, side + frame)[:16]] if self.key else []

    def say(self, kind: str, **fields: Any) -> None:
        self.sent = LAST if kind == "BYE" else self.sent + 1
        frame = pack([VERSION, self.session, self.sent, kind, {"kind": kind, **fields}])
        self.sock.send_multipart([frame, *self.seal(b"dialled", frame)])

    def hear(self, kind: str) -> Body:
        """The next message of this kind; its sequence number and seal are right."""
        while self.sock.poll(30_000):
            frame, *mark = self.sock.recv_multipart()
            version, session, sequence, found, body = unpack(frame)
            assert (version, session, found) == (VERSION, self.session, body["kind"])
            assert sequence > self.received
            assert mark == self.seal(b"answered", frame)
            self.received = sequence
            if found == kind:
                return dict(body)
        raise AssertionError(f"no {kind} came")

    def proof(self, side: str, challenge: bytes, hello: Body) -> bytes:
        instance = {**hello["instance"], "groups": in_order(hello["instance"]["groups"])}
        body = {**hello, "fingerprint": in_order(hello["fingerprint"]), "instance": instance, "proof": b""}
        return mac(TICKET_KEY, b"baton-hello-1\0" + pack([side, self.address, challenge, body]))

    def join(self) -> Body:
        """P's HELLO, which proves that P knows the ticket key."""
        own = {"engine_id": "foreign", "incarnation": self.incarnation, "fingerprint": {"x": "y"}}
        self.say("HELLO", **own, instance={"rank": 0, "groups": {}}, challenge=self.challenge)
        theirs = self.hear("HELLO")
        assert theirs["proof"] == self.proof("answered", self.challenge, theirs)
        assert theirs["descriptor"] is None
        hello = {
            **{"kind": "HELLO", **own, "fingerprint": theirs["fingerprint"], "instance": theirs["instance"]},
            **{"challenge": self.challenge, "proof": b"", "descriptor": self.descriptor},
        }
        hello["proof"] = self.proof("dialled", theirs["challenge"], hello)
        self.say(**hello)
        self.key = mac(TICKET_KEY, b"baton-session-1\0" + self.challenge + theirs["challenge"])
        theirs = self.hear("HELLO")
        assert theirs["descriptor"]
        return theirs

    def close(self) -> None:
        self.sock.close(0)
        self.context.term()


def ticket_text(p: Body, d: ForeignDecoder) -> str:
    """What a router signs. All clocks of this host are one."""
    ticket: Body = {"transfer_id": os.urandom(16), "attempt": 0, "mode": "push", "request_digest": bytes(32)}
    ends = {"prefill": (p["engine_id"], p["incarnation"]), "decode": ("foreign", d.incarnation)}
    for side, (engine, incarnation) in ends.items():
        ticket |= {f"{side}_engine": engine, f"{side}_incarnation": incarnation, f"{side}_addresses": [d.address]}
        ticket[f"{side}_expiry"] = time.monotonic() + 60
    body = pack(ticket)
    return base64.urlsafe_b64encode(body + mac(TICKET_KEY, b"baton-ticket-1\0" + body)).rstrip(b"=").decode()


@pytest.fixture
def ends() -> Iterator[tuple[Node, Node, ForeignDecoder]]:
    p, memory = (Node(name, f"{name}-1", "shm://", ticket_key=TICKET_KEY, integrity="full") for name in "PD")
    d = ForeignDecoder(p.agent.address, memory.descriptor)
    yield p, memory, d
    d.close()
    for node in (p, memory):
        node.close()


def test_a_peer_that_knows_the_document_gets_a_prompt(ends: tuple[Node, Node, ForeignDecoder]) -> None:
    p, memory, d = ends
    text = ticket_text(d.join(), d)
    ticket = verify_ticket(TICKET_KEY, text, "prefill", time.monotonic())
    key = [ticket.transfer_id, 0, ticket.prefill_incarnation, d.incarnation, 0, 0]
    d.say("RENEW", lease=30.0, nonce=7)
    assert d.hear("RENEW")["stalled"] is False
    d.say("ANNOUNCE", key=key, ticket=text)
    p.agent.open_prefill(ticket)
    p.agent.admit_prefill(ticket.key)
    assert d.hear("ADMITTED")["key"] == key

    rng, count = np.random.default_rng(0), -(-NUM_TOKENS // p.page_size)
    source, dest = (rng.permutation(np.arange(1, NUM_PAGES))[:count].tolist() for _ in "pd")
    for group in GROUPS:
        p.pools[group][source] = rng.random(p.pools[group][source].shape, np.float32)
    wanted = {group: [0, NUM_TOKENS] for group in GROUPS}
    d.say("REGISTER", key=key, ticket=text, wanted=wanted, pages={"target": dest}, same={"draft": "target"})
    p.agent.declare_final(ticket.key, NUM_TOKENS, dict.fromkeys(GROUPS, source), dict.fromkeys(GROUPS, NUM_TOKENS - 1))
    p.agent.finish_prefill(ticket.key, SEEDS, False, dict.fromkeys(GROUPS, NUM_TOKENS))
    commit = d.hear("COMMIT")
    assert (commit["key"], commit["round"], commit["final"]) == (key, 0, dict.fromkeys(GROUPS, NUM_TOKENS))
    seeds = {"first_token": 5, "first_logprobs": None, "draft_token_ids": [6, 7], "drafter_states": b""}
    assert commit["seeds"] == seeds
    assert commit["seeds_digest"] == xxhash.xxh3_64_digest(pack([key, seeds]))
    for group in GROUPS:
        got = memory.pools[group][dest].transpose(1, 2, 0, 3, 4, 5)
        layers = got.reshape(*got.shape[:2], -1, *got.shape[4:])  # [layer, plane, token, head, element]
        at = 0
        for (start, stop), hashes in commit["digests"][group]:
            assert start == at, "pieces are in order, without gaps"
            parts = [(layer, plane) for layer in range(len(layers)) for plane in (0, 1)]
            own = b"".join(
                xxhash.xxh3_64_digest(
                    layers[layer, plane, start:stop].tobytes(),
                    xxhash.xxh3_64_intdigest(f"{group}\0{'kv'[plane]}\0{layer}\0{0}\0{start}\0{stop}".encode()),
                )
                for layer, plane in parts
            )
            assert hashes == own
            at = stop
        assert at == NUM_TOKENS
    d.say("ACK", key=key)
    assert p.events.get(timeout=60) == PrefillReleased(ticket.key, "committed")
    d.say("BYE", reason="done", quiet=True)


def test_a_ticket_of_another_key_is_refused_by_name(ends: tuple[Node, Node, ForeignDecoder]) -> None:
    _, _, d = ends
    text = ticket_text(d.join(), d)
    key = [bytes(16), 0, "P-1", d.incarnation, 0, 0]
    d.say("ANNOUNCE", key=key, ticket=text[:-4] + "AAAA")
    nack = d.hear("NACK")
    assert (nack["key"], nack["reason"], nack["message"]) == (
        key,
        "register_refused",
        "ticket signature does not match: it is signed with another ticket key",
    )
    d.say("CANCEL", key=key, reason="register_refused")
    assert d.hear("CANCELLED")["reason"] == "register_refused"
