"""When the decode server of SGLang's own backends says the first token: so long after the end of the prefill.

    python tools/install_sglang.py python -m benchmarks.sglang.first_tokens

A router that relays the decode server's first token waits for this handoff; one that passes the prefill server's on
does not. With `--enable-metrics` SGLang tells when a prefill ended. From then until the client has the token, one
SGLang needs what its HTTP server costs; a pair needs the handoff besides: the difference to one SGLang's median. Rounds
are those of `benchmarks.sglang.handoffs`. `benchmarks.serving.router_speed --handoff-ms` takes such a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.sglang.handoffs import PAIR, Deployment, Timed, own_configs, room_at, turns
from testkit.sglang.servers import MODEL, Config, free_port, serve

ONE = "one SGLang"
_METRICS = ("--enable-metrics",)
_NUM_TOKENS = 4
Rounds = Sequence[Mapping[str, Timed]]


def waits_ms(rounds: Rounds, name: str) -> list[float]:
    """From the end of the prefill until the client has the token."""
    return [1e3 * (found[name].said - found[name].prefilled) for found in rounds if name in found]


def handoffs_ms(rounds: Rounds, name: str) -> list[float]:
    """By how much longer a pair takes than one server does, at the median."""
    one = statistics.median(waits_ms(rounds, ONE) or [math.nan])
    return [pair - one for pair in waits_ms(rounds, name)]


def table(rounds: Rounds, names: Sequence[str]) -> list[str]:
    """Medians with quartiles and ranges, as Markdown."""
    lines = [
        "| backend | rounds | prefill to first token, ms | handoff, ms | quartiles | range |",
        "|---|---|---|---|---|---|",
    ]
    for name in (ONE, *names):
        waits = waits_ms(rounds, name)
        cells = [name, str(len(waits)), f"{statistics.median(waits):.1f}" if waits else "-"]
        handoffs = sorted(handoffs_ms(rounds, name)) if name != ONE else []
        cells += [f"{statistics.median(handoffs):.1f}"] if handoffs else ["-"]
        quarter = len(handoffs) // 4
        for low, high in ((quarter, -1 - quarter), (0, -1)):
            cells.append(f"{handoffs[low]:.1f} to {handoffs[high]:.1f}" if handoffs else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def command(
    model: Annotated[Path, typer.Option(help="Checkpoint directory.")] = MODEL,
    backends: Annotated[str, typer.Option(help="SGLang's own transfer backends.")] = "nixl,mooncake_tcp",
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512",
    num_rounds: Annotated[int, typer.Option(help="Rounds for each length.")] = 20,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the servers' logs here.")] = None,
    json_output: Annotated[Path | None, typer.Option("--json", help="Write every time that was taken here.")] = None,
) -> None:
    """The handoffs of SGLang's own backends, as a client sees them."""
    names = backends.split(",")
    ports = {name: free_port() for name in names}
    configs = [Config("one", [*PAIR, *_METRICS])]
    for name, port in ports.items():
        configs += own_configs(name, _METRICS, port)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        folder = log_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with serve(folder, configs, model) as (one, *others):
            deployments = [Deployment(ONE, (one,), lambda _: {})]
            for at, (name, port) in enumerate(ports.items()):
                pair = (others[2 * at], others[2 * at + 1])
                deployments.append(Deployment(name, pair, lambda _, port=port: room_at(port)))  # type: ignore[misc]
            for length in map(int, lengths.split(",")):
                rounds = asyncio.run(_rounds(deployments, length, num_rounds))
                results[str(length)] = {name: waits_ms(rounds, name) for name in (ONE, *names)}
                print(f"\n{length} tokens, {num_rounds} rounds:")
                print("\n".join(table(rounds, names)), flush=True)
    if json_output is not None:
        json_output.write_text(json.dumps(results))


async def _rounds(deployments: Sequence[Deployment], length: int, num_rounds: int) -> list[dict[str, Timed]]:
    return [found async for found in turns(deployments, length, num_rounds, _NUM_TOKENS)]


if __name__ == "__main__":
    typer.run(command)
