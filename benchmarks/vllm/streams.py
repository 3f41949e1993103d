"""The effect of `kv_stream` in vLLM on CPUs: one server against P/D with each value, and the gaps between first tokens.

    python -m benchmarks.vllm.streams serve /tmp/servers --vllm-python $(python3 tools/install_vllm.py)/bin/python
    python -m benchmarks.vllm.streams ask /tmp/servers

`serve` starts a single server, a decode server, and a prefill server for each value, and keeps them running. `ask`
measures, any number of times, as `benchmarks.vllm.handoffs` does: each round sends the same new prompt to all, one at
a time in changing order, without a router. Ratios are taken within rounds. "seeded": the decode server gets the prefill
server's first token (`baton router --seed-first-token`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer

from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.keys import make_keys, ticket_key_file
from baton.wire import KVStream
from benchmarks.vllm.handoffs import FLAGS, MODEL, Deployment, Row, _transfer, rounds, table
from benchmarks.vllm.legs import Baton, BatonSeeded, Single
from benchmarks.vllm.servers import ServerConfig, serve

STREAMS: tuple[KVStream, ...] = get_args(KVStream)
NUM_GAPS = 10
app = typer.Typer(add_completion=False)


@app.command("serve")
def serve_command(
    folder: Annotated[Path, typer.Argument(help="Logs, keys and the servers' addresses.")],
    vllm_python: Annotated[str, typer.Option(help="An interpreter that has vLLM.")] = sys.executable,
    model: Annotated[str, typer.Option(help="Checkpoint directory.")] = MODEL,
    streams: Annotated[str, typer.Option(help="Values of kv_stream; chunk among them.")] = ",".join(STREAMS),
    flags: Annotated[str, typer.Option(help="Further arguments of every server.")] = "",
) -> None:
    """Start the servers, print "ready", and keep them running until interrupted."""
    folder.mkdir(parents=True, exist_ok=True)
    values = streams.split(",")
    keys, every = str(folder / "keys"), (*FLAGS, *flags.split())
    make_keys(folder / "keys", ["D", *values])
    configs = [
        ServerConfig("one", every),
        ServerConfig("D", every, _transfer("BatonConnector", "kv_consumer", "D", keys=keys)),
    ]
    for value in values:
        transfer = _transfer("BatonConnector", "kv_producer", value, keys=keys, kv_stream=value)
        configs.append(ServerConfig(value, every, transfer))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with serve(vllm_python, model, folder, configs) as servers:
        (folder / "servers.json").write_text(json.dumps({server.name: server.url for server in servers}))
        print("ready", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        (folder / "servers.json").unlink()


@app.command("ask")
def ask_command(
    folder: Annotated[Path, typer.Argument(help="That of `serve`.")],
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,2000",
    num_rounds: Annotated[int, typer.Option(help="Rounds for each length.")] = 12,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256,
    sleep_s: Annotated[float, typer.Option(help="Rest between two requests.")] = 0.3,
    json_output: Annotated[Path | None, typer.Option("--json", help="Write every time that was taken here.")] = None,
) -> None:
    """Time to first token, time per token and first gaps, by deployment."""
    urls: dict[str, str] = json.loads((folder / "servers.json").read_text())
    key = load_or_create_key(ticket_key_file(folder / "keys"))
    one = Deployment("one vLLM", Single(urls.pop("one")), ())
    decode, found = urls.pop("D"), {}
    pairs = [Deployment(name, Baton(url, decode, key, "push"), ()) for name, url in urls.items()]
    # Its decode leg starts when the prompt is computed, so there is nothing to stream.
    pairs.append(Deployment("seeded", BatonSeeded(urls["chunk"], decode, key, "push"), ()))
    for length in (int(each) for each in lengths.split(",")):
        rows = asyncio.run(rounds(one, pairs, length, num_rounds, max_tokens, pause=False, sleep_s=sleep_s))
        print(f"\n{length} tokens, {num_rounds} rounds, {max_tokens} tokens each:")
        print("\n".join([*table(rows, one.name), "", *gap_table(rows)]), flush=True)
        found[str(length)] = {name: asdict(row) for name, row in rows.items()}
    if json_output is not None:
        json_output.write_text(json.dumps(found))


def gap_table(rows: dict[str, Row]) -> list[str]:
    """For each of the first tokens, the milliseconds since the one before: medians with quartiles, as Markdown."""
    lines = [f"| token | {' | '.join(rows)} |", "|---|" + "---|" * len(rows)]
    for index in range(NUM_GAPS):
        cells = []
        for row in rows.values():
            gaps = [each[index] for each in row.gaps if len(each) > index]
            cells.append(_spread(gaps))
        lines.append(f"| {index + 2} | {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    return f"{statistics.median(ordered):.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    app()
