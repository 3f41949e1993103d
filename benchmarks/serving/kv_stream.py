"""`python -m benchmarks.serving.kv_stream`: prompts on a prefill and a decode engine, over one engine, as Markdown.

One deployment for each value of `--kv-stream`, and one engine. All are idle except for the timed prompt, which no cache
holds. They are measured in turns, so that disturbances of the machine affect all of them. A ratio is of one round;
figures are medians with the quartiles.

Handover: from the first token, which P sends, to the tokens of D's first step, both as a client sees them; on one
engine the same two tokens, between which its drafter also processes the prompt. Hidden: the share of a handoff's bytes
that P had copied when its prefill, including the drafter's, was over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from benchmarks.demo import TARGET
from benchmarks.scrape import scrape

DRAFTER = "models/baton-demo-eagle3"
STREAMS = ("off", "chunk", "layer")
ONE = "one engine"


@dataclass(slots=True)
class Found:
    """One way and length: milliseconds per round, and bytes over all rounds."""

    ttft: list[float] = field(default_factory=list)
    handover: list[float] = field(default_factory=list)
    num_hidden: float = 0.0
    num_bytes: float = 0.0


def longer(source: str, folder: Path, num_tokens: int) -> str:
    """A copy of the checkpoint in `source` with a context of at least `num_tokens`."""
    folder.mkdir()
    for file in Path(source).resolve().iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = max(num_tokens, config["max_position_embeddings"])
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


async def measure(
    ways: dict[str, Deployment], lengths: Sequence[int], rounds: int, vocab_size: int
) -> dict[tuple[int, str], Found]:
    """Measure all ways in turns. The first two rounds of each length (one if `rounds` is at most 3) do not count."""
    rng = random.Random(0)
    warm_up = 2 if rounds > 3 else 1
    found: dict[tuple[int, str], Found] = {}
    async with aiohttp.ClientSession() as session:
        for length in lengths:
            for turn in range(-warm_up, rounds):
                for name, deployment in ways.items():
                    one = found.setdefault((length, name), Found())
                    prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
                    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
                    before = await _bytes(session, deployment, name)
                    answer = await stream_completion(session, deployment.url, body)
                    if turn < 0:
                        continue
                    one.ttft.append(answer.ttft_s * 1e3)
                    later = min(at for at in answer.times_s if at > answer.times_s[0])
                    one.handover.append((later - answer.times_s[0]) * 1e3)
                    if name != ONE:
                        await asyncio.sleep(0.05)  # until P knows of the commit
                        after = await _bytes(session, deployment, name)
                        one.num_hidden += after[0] - before[0]
                        one.num_bytes += after[1] - before[1]
    return found


async def _bytes(session: aiohttp.ClientSession, deployment: Deployment, name: str) -> tuple[float, float]:
    if name == ONE:
        return 0.0, 0.0
    (url,) = deployment.prefill_urls
    hidden = sum(await scrape(session, url, "baton:handoff_hidden_bytes"))
    return hidden, sum(await scrape(session, url, "baton:handoff_copied_bytes"))


def table(found: dict[tuple[int, str], Found], lengths: Sequence[int]) -> str:
    heads = ("tokens", "way", "TTFT ms", "over one engine", "handover p50 ms", "p99 ms", "bytes hidden")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for length in lengths:
        alone = found[length, ONE].ttft
        for name in (ONE, *(stream for stream in STREAMS if (length, stream) in found)):
            one = found[length, name]
            ratios = [ours / theirs for ours, theirs in zip(one.ttft, alone, strict=True)]
            late = statistics.quantiles(one.handover, n=100, method="inclusive")
            cells = (_middle(one.ttft), _middle(ratios, 3), f"{late[49]:.2f}", f"{late[98]:.2f}")
            hidden = f"{one.num_hidden / one.num_bytes:.3f}" if one.num_bytes else "-"
            lines.append(f"| {length} | {name} | {' | '.join(cells)} | {hidden} |")
    return "\n".join(lines)


def _middle(found: list[float], digits: int = 2) -> str:
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.kv_stream")
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--drafter", default=DRAFTER, help="an EAGLE-3 head for the model")
    parser.add_argument("--lengths", default="128,512,2048,8192")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", default=",".join(STREAMS), help="of all, which --kv-stream")
    parser.add_argument("--kv-cache-memory", default="1G", help="of each engine")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of all engines")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    if not set(options.streams.split(",")) <= set(STREAMS):
        parser.error(f"--streams: of {', '.join(STREAMS)}")
    if options.rounds < 2 or min(lengths) < 1:
        parser.error("--rounds must be at least 2, and --lengths at least 1")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        room = max(lengths) + 64
        model = longer(options.model, Path(folder, "model"), room)
        spec = {"method": "eagle3", "model": longer(options.drafter, Path(folder, "drafter"), room)}
        flags = ["--speculative-config", json.dumps(spec), "--max-model-len", str(room)]
        flags += ["--kv-cache-memory", options.kv_cache_memory, *options.flag]
        ways = {ONE: Deployment(model, prefill=0, decode=0, both=1, router=False, engine_flags=flags)}
        for name in options.streams.split(","):
            roles = {"prefill": ["--kv-stream", name]}
            ways[name] = Deployment(model, engine_flags=flags, role_flags=roles, router_flags=["--kv-mode", "push"])
        for deployment in ways.values():
            stack.enter_context(deployment)
        vocab_size = json.loads(Path(model, "config.json").read_text())["vocab_size"]
        found = asyncio.run(measure(ways, lengths, options.rounds, vocab_size))
    print(table(found, lengths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
