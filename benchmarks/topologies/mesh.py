"""What the sessions of many engines cost, and that those which nobody uses end.

    python -m benchmarks.topologies.mesh [--engines 100] [--peers 50] [--idle 20] [--seconds 10]

Half of the engines prefill, half decode: agents with real sockets and shared memory in this process, without a model.
Each decode engine gets one handoff from `--peers` prefill engines, by default from all. Then nothing is handed over,
and the cost of the open sessions is the CPU time and memory of this process, over those before. After `--idle` seconds
without an attempt that is remembered, which lasts until tickets expire, sessions end.
"""

from __future__ import annotations

import argparse
import resource
import secrets
import time
from contextlib import ExitStack

from baton.bench.modelled import ModelledEngine, ModelledKV
from baton.handoff.agent.agent import Timers
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.ticket import SignedTicket, Ticket, new_transfer_id, sign_ticket

_KV = ModelledKV(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16", block_size=16, layout="block")
_TOKENS, _PAGES = 16, 8
_TICKET_S = 20.0
_LIMIT_S = 120.0


def hand_over(p: ModelledEngine, d: ModelledEngine, key: bytes) -> None:
    """One prompt of a page. Raises `HandoffError` if it does not arrive."""
    expiry = time.monotonic() + _TICKET_S
    ticket = Ticket(
        transfer_id=new_transfer_id(),
        prefill_engine=p.name,
        prefill_incarnation=f"{p.name}-1",
        prefill_addresses=[agent.address for agent in p.agents],
        decode_engine=d.name,
        decode_incarnation=f"{d.name}-1",
        decode_addresses=[agent.address for agent in d.agents],
        mode="push",
        prefill_expiry=expiry,
        decode_expiry=expiry,
        request_digest=bytes(32),
    )
    signed = SignedTicket.of(ticket, sign_ticket(key, ticket))
    final, tables = _KV.final(_TOKENS, _TOKENS), {group: [1, 2] for group in _KV.groups}
    p.together.open_prefill(signed)
    p.together.admit_prefill(signed.key)
    p.together.declare_final(signed.key, _TOKENS, tables, final)
    final = _KV.final(_TOKENS, _TOKENS, seeded=True)
    p.together.finish_prefill(signed.key, Seeds(first_token=1), False, final)
    d.together.open_decode(signed, _TOKENS, _KV.wanted(_TOKENS), tables)
    d.next(lambda event: isinstance(event, ev.DecodeCommitted))
    p.next(lambda event: isinstance(event, ev.PrefillReleased))


def num_sessions(engines: list[ModelledEngine]) -> int:
    return sum(agent.stats().sessions for engine in engines for agent in engine.agents)


def cpu_share(seconds: float) -> float:
    """The share of a core that this process takes while it waits."""
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--peers", type=int, help="prefill engines of each decode engine")
    parser.add_argument("--idle", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    key, half = secrets.token_bytes(32), options.engines // 2
    timers = Timers(idle=options.idle)
    with ExitStack() as undo:
        engines = []
        for number in range(2 * half):
            name = f"{'PD'[number // half]}{number % half}"
            engines.append(ModelledEngine(name, _KV, 1, _PAGES, "shm://", key, timers))
            undo.callback(engines[-1].close)
        p, d = engines[:half], engines[half:]
        alone, before = cpu_share(options.seconds), memory_bytes()
        print(f"{len(engines)} engines, no session: {alone:.3f} of a core", flush=True)
        began = time.monotonic()
        for turn in range(min(options.peers or half, half)):
            for number, decode in enumerate(d):
                hand_over(p[(number + turn) % half], decode, key)
        seconds, count = time.monotonic() - began, num_sessions(d)
        each_ms = 1e3 * seconds / count
        print(f"{count} sessions of {half * half} pairs opened in {seconds:.0f} s, {each_ms:.1f} ms each", flush=True)
        share, used = cpu_share(options.seconds), memory_bytes() - before
        both = 2 * count
        print(
            f"open: {share:.3f} of a core, {1e6 * (share - alone) / both:.0f} us per second and end of a session; "
            f"{used / both / 1024:.0f} KiB per end",
            flush=True,
        )
        until = time.monotonic() + _TICKET_S + 2 * options.idle + _LIMIT_S
        while num_sessions(engines) and time.monotonic() < until:
            time.sleep(1.0)
        print(f"later: {num_sessions(engines)} sessions, {cpu_share(options.seconds):.3f} of a core", flush=True)
        hand_over(p[0], d[0], key)
        print(f"one more handoff: {num_sessions(d)} session")


if __name__ == "__main__":
    main()
