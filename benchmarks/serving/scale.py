"""Unit costs of a large deployment's router, and what saturates first.

    python -m benchmarks.serving.scale --request-ms 3 --token-us 70 --session-us 90 --session-kib 120

Measured here: the choice of two engines, and a ticket. `benchmarks.serving.router_speed` measures requests and
tokens, `benchmarks.topologies.mesh` sessions, `benchmarks.serving.event_index` KV events; these figures are given by
flags or are constants here. All else is arithmetic: for routers over all engines, and for one router per cell of them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from baton.handoff.protocol.ticket import Ticket, new_transfer_id, sign_ticket
from baton.router.prefixes import PromptBlocks
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest
from benchmarks.serving.goodput import Cluster, Machine

_PAGE, _BLOCK_BYTES, _BLOCKS_PER_S = 16, 200, 49_000  # the last two: benchmarks.serving.event_index


def seconds(call: Callable[[], object], num: int) -> float:
    call()
    began = time.process_time()
    for _ in range(num):
        call()
    return (time.process_time() - began) / num


def choice_s(num_engines: int, num_prompt: int, held: float) -> float:
    """One choice of D and P among so many engines, of which this share holds the prompt's beginning."""
    half, rng = num_engines // 2, random.Random(0)
    cluster = Cluster("cache_aware", half, num_engines - half, Machine())
    tokens = list(range(num_prompt))
    for engine in cluster.models:
        if rng.random() < held:
            engine.known.learn(PromptBlocks(tokens[: num_prompt // 2]))

    def choose() -> None:
        wire = GenerateRequest(request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams())
        cluster.routes.choose(wire, (), True)

    return seconds(choose, max(3, 3000 // num_engines))


def ticket_s() -> float:
    ticket = Ticket(
        transfer_id=new_transfer_id(),
        prefill_engine="prefill-0",
        prefill_incarnation="1" * 32,
        prefill_addresses=["tcp://10.0.0.1:5555"],
        decode_engine="decode-0",
        decode_incarnation="2" * 32,
        decode_addresses=["tcp://10.0.0.2:5555"],
        mode="push",
        prefill_expiry=1.0,
        decode_expiry=1.0,
        request_digest=bytes(32),
    )
    return seconds(lambda: sign_ticket(b"k" * 32, ticket), 2000)


def print_router(title: str, engines: int, rate: float, all_rate: float, options: argparse.Namespace) -> None:
    """What one router needs that has `rate` requests a second, and whose engines have `all_rate`."""
    prompt, output, check = options.prompt, options.output, RouterTimers().check
    # P and D both store what is new, and later remove it.
    blocks = all_rate * (prompt * (1 - options.known) + output) * 2 * 2 / _PAGE
    kept = engines * Machine().kv_tokens * 2 / _PAGE
    print(f"\n{title}, at {rate:.0f} requests/s; cores are of CPU time:")
    for name, cores in (
        ("requests", rate * options.request_ms / 1e3),
        ("tokens", rate * output * options.token_us / 1e6),
        ("choice", rate * choice_s(engines, prompt, 0.1)),
        (f"KV events ({blocks / 1e6:.2f} million blocks/s stored and removed)", blocks / _BLOCKS_PER_S),
        (f"questions ({engines / check:.0f}/s)", engines / check * options.question_us / 1e6),
    ):
        print(f"  {name}: {cores:.2f} cores")
    print(f"  index of {kept / 1e6:.1f} million blocks: {kept * _BLOCK_BYTES / 2**30:.1f} GiB")


def print_engine(title: str, peers: int, routers: int, options: argparse.Namespace) -> None:
    share, memory = peers * options.session_us / 1e6, peers * options.session_kib / 1024
    print(f"{title}:")
    print(f"  questions of routers: {routers / RouterTimers().check:.0f}/s")
    print(f"  {peers} sessions, if each D uses each P: {share:.3f} cores, {memory:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--routers", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100_000.0, help="requests per second, of all routers")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--known", type=float, default=0.4, help="the share of it that engines hold")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--request-ms", type=float, required=True, help="CPU of a router per request")
    parser.add_argument("--token-us", type=float, required=True, help="... and per token")
    parser.add_argument("--question-us", type=float, default=500.0, help="... and per question to an engine")
    parser.add_argument("--session-us", type=float, required=True, help="CPU of one end of a session per second")
    parser.add_argument("--session-kib", type=float, required=True, help="memory of one end of a session")
    options = parser.parse_args()
    engines, routers, rate = options.engines, options.routers, options.rate
    for count in sorted({8, 100, engines // 10, engines}):
        times = [1e6 * choice_s(count, options.prompt, held) for held in (0.0, 0.1)]
        print(f"choice among {count} engines: {times[0]:.0f} us; if a tenth hold half of the prompt {times[1]:.0f} us")
    print(f"ticket {1e6 * ticket_s():.0f} us")
    print_router(f"One router of {routers} over all engines", engines, rate / routers, rate, options)
    print_engine("One engine", engines // 2, routers, options)
    cell = max(2, engines // routers)
    print_router(f"One router of {routers} over its own {cell} engines", cell, rate / routers, rate / routers, options)
    print_engine("One engine", cell // 2, 1, options)


if __name__ == "__main__":
    main()
