"""Conversations of several turns: TTFT and computed prompt tokens per turn, by how the router chooses engines.

    python -m benchmarks.serving.turns [MODEL] [--chats 12] [--turns 5] [--at-once 3] [--handed-off] [--ways one,...]

Chats share a few system prompts. Each turn's prompt is the conversation so far, with the answers as they came, and new
tokens. All chats take their first turn, then their second, and so on, in any order. Ways: `one` engine that does both;
two prefill and two decode engines with `round_robin`, with `cache_aware` by guesses, or by KV events (`events`), and
both of these with hand-back. `--handed-off`: decode engines compute no prompt alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from dataclasses import dataclass, field

import aiohttp

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from baton.router.config.router_settings import MAX_LOCAL_PREFILL_LENGTH
from benchmarks.scrape import get_json, scrape

TARGET = "models/baton-demo-llama"
_EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
WAYS: dict[str, tuple[list[str], list[str]]] = {  # flags of the engines, and of the router
    "one": ([], []),
    "round_robin": ([], ["--policy", "round_robin"]),
    "least_loaded": ([], ["--policy", "least_loaded"]),
    "cache_aware": ([], []),
    "hand_back": ([], ["--policy-config", json.dumps({"hand_back": True})]),
    "hand_back_events": (
        ["--kv-events-config", json.dumps(_EVENTS)],
        ["--policy-config", json.dumps({"hand_back": True})],
    ),
    "events": (["--kv-events-config", json.dumps(_EVENTS)], []),
}
_SYSTEM_TOKENS, _SYSTEMS = 160, 2
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of a user's message and of an answer; chats, turns, and chats that run at once."""

    chats: int = 12
    turns: int = 5
    at_once: int = 3
    message: int = 40
    answer: int = 50


@dataclass(slots=True)
class TurnsReport:
    """Per turn: seconds to the first tokens, and prompt tokens that engines computed."""

    ttft_s: list[list[float]] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    routes: str = ""

    def later(self) -> list[float]:
        return [second for turn in self.ttft_s[1:] for second in turn]

    def over(self, one: TurnsReport) -> str:
        """Ratios to one engine's: median TTFT of later turns, and computed tokens."""
        ttft = statistics.median(self.later()) / statistics.median(one.later())
        later = sum(self.computed[1:]) / sum(one.computed[1:])
        whole = sum(self.computed) / sum(one.computed)
        return f"over one engine: TTFT {ttft:.2f}, computed {whole:.3f}, later {later:.3f}"

    def line(self, name: str) -> str:
        later = sorted(self.later())
        p50, p99 = statistics.median(later) * 1e3, later[min(len(later) - 1, int(len(later) * 0.99))] * 1e3
        first = statistics.median(self.ttft_s[0]) * 1e3
        turns = " ".join(f"{count:6.0f}" for count in self.computed)
        return (
            f"{name:12s} TTFT turn 1 p50 {first:6.1f} ms, later p50 {p50:6.1f}, p99 {p99:6.1f}; "
            f"computed by turn {turns}, sum {sum(self.computed):.0f}, of new tokens {sum(self.new)}\n"
            f"{'':12s} {self.routes}"
        )


async def _run(deployment: Deployment, load: Load) -> TurnsReport:
    rng, report, at_once = random.Random(0), TurnsReport(), asyncio.Semaphore(load.at_once)
    systems = [[rng.randrange(3, 2000) for _ in range(_SYSTEM_TOKENS)] for _ in range(_SYSTEMS)]
    chats = [list(systems[number % _SYSTEMS]) for number in range(load.chats)]
    async with aiohttp.ClientSession() as session:

        async def take_turn(chat: list[int]) -> float:
            chat += [rng.randrange(3, 2000) for _ in range(load.message)]
            body = {"prompt": list(chat), "max_tokens": load.answer, "temperature": 0.0, "ignore_eos": True}
            async with at_once:
                answer = await stream_completion(session, deployment.url, body)
            chat += answer.token_ids
            report.answers.append(answer.token_ids)
            return answer.ttft_s

        warm = [[rng.randrange(3, 2000) for _ in range(200)] for _ in range(8)]
        for prompt in warm:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
            await stream_completion(session, deployment.url, body)
        before = await _computed(session, deployment)
        for turn in range(load.turns):
            rng.shuffle(chats)  # no policy profits from their order
            report.ttft_s.append(await asyncio.gather(*(take_turn(chat) for chat in chats)))
            await asyncio.sleep(_PAUSE_S)
            after = await _computed(session, deployment)
            report.computed.append(after - before)
            own = load.message if turn else load.message + _SYSTEM_TOKENS * _SYSTEMS / load.chats
            report.new.append(round(load.chats * own))
            before = after
        status = await get_json(session, f"{deployment.url}/status")
        report.routes = status["decisions"]["summary"]
        if status["hand_backs"]["completed"] or status["hand_backs"]["failed"]:
            report.routes += f"; handed back: {json.dumps(status['hand_backs'])}"
    return report


async def _computed(session: aiohttp.ClientSession, deployment: Deployment) -> float:
    """Prompt tokens that all engines have computed."""
    name = "vllm:prompt_tokens_by_source"
    return sum([sum(await scrape(session, url, name, source="local_compute")) for url in deployment.engine_urls])


def measure(model: str, way: str, load: Load, handed_off: bool = False) -> TurnsReport:
    """Start the deployment of a way, and run all chats."""
    engine, router = WAYS[way]
    pairs, both = (0, 1) if way == "one" else (2, 0)
    most = 0 if handed_off else MAX_LOCAL_PREFILL_LENGTH  # as `baton up` has it
    router = ["--max-local-prefill-length", str(most), *router]
    with Deployment(model, pairs, pairs, both, engine_flags=engine, router_flags=router) as deployment:
        return asyncio.run(_run(deployment, load))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=TARGET)
    for name in ("chats", "turns", "at_once", "message", "answer"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Load(), name))
    parser.add_argument("--ways", default="one,round_robin,cache_aware,events")
    parser.add_argument("--handed-off", action="store_true")
    options = vars(parser.parse_args())
    model, ways, handed_off = options.pop("model"), options.pop("ways").split(","), options.pop("handed_off")
    load, first = Load(**options), None
    for way in ways:
        report = measure(model, way, load, handed_off)
        first = first or report
        same = sorted(report.answers) == sorted(first.answers)
        print(report.line(way), "" if same else "; ANSWERS DIFFER", flush=True)
        if ways[0] == "one" and report is not first:
            print(f"{'':12s} {report.over(first)}", flush=True)


if __name__ == "__main__":
    main()
