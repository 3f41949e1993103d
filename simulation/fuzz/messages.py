"""Fuzz a live handoff agent with broken control messages while it hands requests over.

    python -m simulation.fuzz.messages --messages 1000000

Two engines without models, P and D, run in this process, hand requests over and compare every byte. Other processes
connect to both and send the frames of `simulation.fuzz.frames`: messages of each kind with fields changed, truncated,
of other types or huge, replays, spent tickets, foreign attempts, and sessions opened and left by the hundred. With
`--keys` the attackers are an engine with an authorised key; without, any process on this host.

Every handoff must be served, and memory, open files and threads must not grow.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path

import msgspec
import zmq

from baton.handoff.agent.stats import AgentStats
from baton.handoff.protocol.frames import decode_frame
from baton.handoff.protocol.handshake import prove, seal, session_key
from baton.handoff.protocol.messages import AttemptKey, Hello
from baton.handoff.session.curve import as_client
from baton.handoff.session.keys import KeyRing, Keys, TicketKeys, make_keys
from baton.transports.registry import create_transport
from simulation.fuzz.command import parse, print_faults
from simulation.fuzz.frames import FrameMaker
from simulation.fuzz.pair import HANDOFF_LIMIT_S, SPENT, Traffic, attacked

ATTACKER = "X"
_FRAMES_PER_SESSION, _SESSIONS_PER_SOCKET = 30, 40
_ANSWER_MS = 2000


@dataclass(frozen=True, slots=True)
class Attack:
    seed: int
    messages: int
    addresses: tuple[str, ...]
    hellos: tuple[bytes, ...]  # of P and D, as msgpack
    spent: tuple[tuple[tuple[bytes, int, str, str], str], ...]
    keys: str | None
    ticket_key: bytes


def attack(order: Attack) -> None:
    """Send the messages. The main function of an attacking process."""
    rng = random.Random(order.seed)
    transport = create_transport("shm://")
    own = transport.register([transport.allocate("own", 1 << 20), transport.allocate("own", 1 << 20)])
    victims = [msgspec.msgpack.decode(hello, type=Hello) for hello in order.hellos]
    keys = [AttemptKey(*key) for key, _ in order.spent]
    # Transfers between the same engines that nobody has begun.
    keys += [msgspec.structs.replace(key, transfer_id=rng.randbytes(16)) for key in keys]
    context = zmq.Context()
    ring: Keys = TicketKeys(order.ticket_key) if order.keys is None else KeyRing(order.keys, ATTACKER)
    left = order.messages
    while left > 0:
        address = named = rng.choice(order.addresses)
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 60_000)
        host = address.rpartition("/")[2]
        engine, _, host = host.rpartition("@")
        as_client(sock, ring, ring.public_of(engine) or b"")
        sock.connect(f"tcp://{host}")
        for _ in range(_SESSIONS_PER_SOCKET):
            # Some attackers know the ticket key, so that their later messages are processed.
            insider = rng.random() < 0.4
            # HELLO under its own name or another's, with its own memory descriptor or a random one.
            as_whom = rng.choice(victims)
            hello = msgspec.structs.replace(as_whom, descriptor=rng.choice((own, own, rng.randbytes(20))))
            if order.keys is not None or insider or rng.random() < 0.5:
                hello = msgspec.structs.replace(hello, engine_id=ATTACKER, incarnation=f"{ATTACKER}-{rng.random()}")
            mine = [msgspec.structs.replace(key, decode_incarnation=hello.incarnation) for key in keys[::8]]
            maker = FrameMaker(rng, hello, keys + mine, [ticket for _, ticket in order.spent])
            key = b""
            for number in range(min(left, _FRAMES_PER_SESSION)):
                parts = maker.open() if number == 0 else maker.next()
                sock.send_multipart([*parts, seal(key, "dialled", parts[0])] if key and len(parts) == 1 else parts)
                left -= 1
                if number == 0 and insider:
                    key = _prove(sock, maker, hello, order.ticket_key, named)
                    left -= bool(key)
            while sock.poll(0):
                sock.recv_multipart()
        sock.close()
    context.term()
    transport.close()


def _prove(sock: zmq.Socket[bytes], maker: FrameMaker, hello: Hello, ticket_key: bytes, address: str) -> bytes:
    """Answer the challenge in the peer's HELLO, if one arrives in time, by one message. Returns the session's key, or
    b"".
    """
    while sock.poll(_ANSWER_MS):
        session, _, message = decode_frame(sock.recv_multipart()[0])
        if session == maker.session and isinstance(message, Hello):
            sock.send_multipart(maker.say(prove(ticket_key, "dialled", address, message.challenge, hello)))
            return session_key(ticket_key, hello.challenge, message.challenge)
    return b""


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a process: resident bytes, open files, threads."""

    rss: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int | str = "self") -> Usage:
        """Measure this process, or another one of this user. Of this process, without what the allocator keeps free."""
        if pid == "self":
            ctypes.CDLL(None).malloc_trim(0)
        process = Path("/proc") / str(pid)
        pages = int((process / "statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(process / "fd")), len(os.listdir(process / "task"))
        )

    def __str__(self) -> str:
        return f"{self.rss / 2**20:.0f} MiB, {self.files} files, {self.threads} threads"


@dataclass(frozen=True, slots=True)
class Report:
    sent: int
    received: int
    seconds: float
    served: int
    slowest_s: float
    before: Usage
    after: Usage
    stats: dict[str, AgentStats]
    faults: list[str]


def run(messages: int, seed: int = 0, processes: int = 2, with_keys: bool = False) -> Report:
    """Run the attack. `faults` of the report is empty if all checks passed."""
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as directory:
        keys = str(Path(directory) / "keys") if with_keys else None
        if keys is not None:
            make_keys(keys, ["P", "D", ATTACKER])
        ticket_key = os.urandom(32)
        p, d = (attacked(name, ticket_key, None if keys is None else KeyRing(keys, name)) for name in ("P", "D"))
        try:
            return _run(Traffic(p, d, ticket_key), messages, seed, processes, keys)
        finally:
            d.close()
            p.close()


def _run(traffic: Traffic, messages: int, seed: int, processes: int, keys: str | None) -> Report:
    nodes = (traffic.p, traffic.d)
    for _ in range(SPENT):
        traffic.serve_one()
    spent = tuple((msgspec.structs.astuple(key), ticket) for key, ticket in traffic.spent)
    hellos = tuple(msgspec.msgpack.encode(node.hello) for node in nodes)
    addresses = (traffic.p.agent.address,) * 3 + (traffic.d.agent.address,)

    def wave(number: int, count: int) -> None:
        shares = [count // processes + (index < count % processes) for index in range(processes)]
        orders = [
            Attack(seed * 1000 + number * 100 + i, n, addresses, hellos, spent, keys, traffic.key)
            for i, n in enumerate(shares)
        ]
        _attack_all(orders, traffic)

    # A first attack warms up caches; growth is measured over the second.
    warm_up = messages // 5
    began = time.monotonic()
    wave(0, warm_up)
    seconds = time.monotonic() - began
    faults = _settle(traffic)
    before, began = Usage.of(), time.monotonic()
    wave(1, messages - warm_up)
    seconds += time.monotonic() - began
    faults += _settle(traffic)
    after = Usage.of()
    stats = {node.name: node.agent.stats() for node in nodes}
    received = sum(stats[node.name].frames for node in nodes)
    faults += growth(before, after)
    if not any(thread.name == "baton-handoff" for thread in threading.enumerate()):
        faults.append("the agents' threads have ended")
    if received < messages:
        faults.append(f"{messages} messages were sent, {received} came")
    return Report(messages, received, seconds, traffic.served, traffic.slowest_s, before, after, stats, faults)


def _attack_all(orders: Sequence[Attack], traffic: Traffic) -> None:
    """Run the attackers until they exit, handing over meanwhile."""
    spawn = multiprocessing.get_context("spawn")
    children: list[SpawnProcess] = [spawn.Process(target=attack, args=(o,), daemon=True) for o in orders if o.messages]
    for child in children:
        child.start()
    try:
        while any(child.is_alive() for child in children):
            traffic.serve_one()
            time.sleep(0.005)
        codes = [child.exitcode for child in children]
        assert not any(codes), f"an attacker ended with {codes}"
    finally:
        for child in children:
            child.kill()
            child.join()


def _settle(traffic: Traffic) -> list[str]:
    """Wait until no attempt is open and the attackers' sessions have ended, then hand over once more."""
    nodes, limit = (traffic.p, traffic.d), time.monotonic() + HANDOFF_LIMIT_S
    open_things: dict[str, int] = {}
    while time.monotonic() < limit:
        stats = {node.name: node.agent.stats() for node in nodes}
        # P and D keep their session with each other.
        open_things = {name: s.outstanding + s.quarantined + s.sessions - 1 for name, s in stats.items()}
        if not any(open_things.values()):
            break
        time.sleep(0.05)
    traffic.serve_one()
    return [f"{name} still has {count} attempts or sessions open" for name, count in open_things.items() if count]


def growth(before: Usage, after: Usage) -> list[str]:
    faults = []
    if after.rss - before.rss > 32 << 20:
        faults.append(f"memory grew by {(after.rss - before.rss) >> 20} MiB")
    if after.files > before.files + 8:
        faults.append(f"open files grew from {before.files} to {after.files}")
    if after.threads > before.threads:
        faults.append(f"threads grew from {before.threads} to {after.threads}")
    return faults


def main() -> int:
    """Returns 0 if all checks passed."""
    keys = "CURVE on, the attackers hold an authorised key"
    arguments = parse("simulation.fuzz.messages", __doc__, "--messages", 2, keys)
    logging.getLogger("baton").setLevel(logging.CRITICAL)
    report = run(arguments.messages, arguments.seed, arguments.processes, arguments.keys)
    rate = report.received / report.seconds
    print(f"messages   {report.sent} sent, {report.received} received in {report.seconds:.0f} s ({rate:.0f}/s)")
    print(f"handoffs   {report.served} served, slowest {report.slowest_s * 1000:.0f} ms")
    print(f"before     {report.before}")
    print(f"after      {report.after}")
    for name, stats in report.stats.items():
        print(f"{name:<10} {stats}")
    return print_faults(report.faults)


if __name__ == "__main__":
    sys.exit(main())
