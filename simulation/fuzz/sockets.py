"""Fuzz the ZeroMQ sockets of live handoff agents below the message level, without a key, while they hand over.

    python -m simulation.fuzz.sockets --frames 10000000

P and D, engines without models, run in one process, hand requests over and compare every byte. Other processes connect
to both and send the bytes of `simulation.fuzz.zmtp`: valid and broken greetings, handshakes, commands and frames,
connection ids that only the listener may assign, and messages without an end. They disconnect, or stay connected and
silent. With `--keys` the engines have a key directory, and the attackers know the engines' public keys.

P and D must survive, every handoff must be served, and memory, open files and threads must not grow.
"""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from zmq.utils import z85

from baton.handoff.agent.attempts import TOMBSTONE_S
from baton.handoff.session.curve import HANDSHAKE_MS
from baton.handoff.session.keys import KeyRing, make_keys
from simulation.fuzz.command import parse, print_faults, print_sent, print_times
from simulation.fuzz.messages import Usage, growth
from simulation.fuzz.pair import SHORT_LIFE_S, Traffic, attacked
from simulation.fuzz.strangers import Target, Wave, waves

_NUM_BEFORE = 200  # handoffs before the attack
_PAUSE_S = 0.002  # between two handoffs
_END_S = 60.0
# After the handshake timeout no connection of an attacker is left.
_SETTLE_S = HANDSHAKE_MS / 1000 + 1.0


@dataclass(frozen=True, slots=True)
class Victims:
    """Measurements of P and D: seconds per handoff before and during the attack, refused connections, and frames that
    were read although no holder of a key had sent them.
    """

    before: list[float]
    during: list[float]
    refused: int
    read: int


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run. `faults` is empty if all checks passed."""

    sent: Wave
    seconds: float
    victims: Victims | None
    usage: list[Usage]
    faults: list[str]


# ---------------------------------------------------------------- P and D


def serve(keys: str | None, warm_up_s: float, parent: Connection) -> None:
    """Hand over from P to D until told to stop. The main function of their process. `warm_up_s`: seconds of handoffs
    before the attack, so that the number of tombstones is constant by then.
    """
    logging.getLogger("baton").setLevel(logging.CRITICAL)
    ticket_key = b"k" * 32
    p, d = (attacked(name, ticket_key, None if keys is None else KeyRing(keys, name)) for name in ("P", "D"))
    traffic = Traffic(p, d, ticket_key)

    def timed() -> float:
        began = time.monotonic()
        traffic.serve_one()
        return time.monotonic() - began

    try:
        # The first handoffs touch new pages and open the session.
        before: list[float] = []
        warm = time.monotonic() + warm_up_s
        while len(before) < _NUM_BEFORE or time.monotonic() < warm:
            before.append(timed())
            time.sleep(_PAUSE_S)
        del before[: _NUM_BEFORE // 4]
        parent.send([node.agent.address for node in (p, d)])
        during = []
        while True:
            during.append(timed())
            time.sleep(_PAUSE_S)
            if not parent.poll():
                continue
            settle_s = parent.recv()
            if settle_s is None:
                break
            until = time.monotonic() + settle_s
            while time.monotonic() < until:
                timed()
                time.sleep(0.05)
            parent.send(Usage.of())
        stats = [node.agent.stats() for node in (p, d)]
        read = sum(one.malformed + one.unknown + one.rejected for one in stats)
        parent.send(Victims(before, during, sum(one.refused for one in stats), read))
    finally:
        d.close()
        p.close()


# ---------------------------------------------------------------- one run


def run(
    frames: int,
    seed: int = 0,
    processes: int = 2,
    with_keys: bool = False,
    settle_s: float = _SETTLE_S,
    rate: float = math.inf,
) -> Report:
    """Run the attack. Growth is checked only if `settle_s` lets the attackers' connections end."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as directory:
        keys = str(Path(directory) / "keys") if with_keys else None
        if keys is not None:
            make_keys(keys, ["P", "D"])
        here, there = spawn.Pipe()
        victims = spawn.Process(
            target=serve, args=(keys, TOMBSTONE_S + SHORT_LIFE_S if settle_s else 0.0, there), daemon=True
        )
        victims.start()
        there.close()
        try:
            attack = functools.partial(waves, frames=frames, processes=processes, seed=seed, rate=rate)
            return _run(victims, here, keys, settle_s, attack)
        finally:
            victims.kill()
            victims.join()


def _run(
    victims: SpawnProcess,
    pipe: Connection,
    keys: str | None,
    settle_s: float,
    attack: Callable[[Sequence[Target]], Iterator[Wave]],
) -> Report:
    found: Victims | None = None
    sent = Wave()
    usage: list[Usage] = []
    faults: list[str] = []
    began = time.monotonic()
    try:
        targets = [_target(address, keys) for address in pipe.recv()]
        began = time.monotonic()
        for wave in attack(targets):
            sent.add(wave)
            pipe.send(settle_s)
            usage.append(pipe.recv())
        pipe.send(None)
        found = pipe.recv()
    except (EOFError, ConnectionError):
        victims.join(_END_S)
        faults.append(f"P and D ended with {victims.exitcode}")
    seconds = time.monotonic() - began
    faults += sent.faults
    if len(usage) == 2 and settle_s:
        faults += growth(*usage)
    if found is not None and found.read:
        faults.append(f"{found.read} frames of nobody were read")
    return Report(sent, seconds, found, usage, faults)


def _target(address: str, keys: str | None) -> Target:
    engine, _, place = address.rpartition("/")[2].rpartition("@")
    host, _, port = place.rpartition(":")
    public = None if keys is None else z85.decode(KeyRing(keys, engine).public)
    return Target(host, int(port), public)


def main() -> int:
    """Returns 0 if all checks passed."""
    keys = "a key directory, of which the attackers know what is public"
    arguments = parse("simulation.fuzz.sockets", __doc__, "--frames", 2, keys)
    report = run(arguments.frames, arguments.seed, arguments.processes, arguments.keys, rate=arguments.rate)
    print_sent(report.sent, report.seconds)
    if report.victims is not None:
        print(f"refused    {report.victims.refused} connections")
        print_times("handoffs", report.victims.before, report.victims.during)
    for one in report.usage:
        print(f"usage      {one}")
    return print_faults(report.faults)


if __name__ == "__main__":
    sys.exit(main())
