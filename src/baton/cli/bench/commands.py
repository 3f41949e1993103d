"""The `baton bench` commands. Results are a table, or with --json one JSON object."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from baton.cli.bench.data_plane import handoff_command, transport_command
from baton.cli.bench.load import load_command
from baton.cli.options import ModelArgument, with_options
from baton.cli.results import JsonFlag
from baton.engine.config import SpeculativeConfig
from baton.engine.loading.hub import checkpoint_directory
from baton.wire import Mode

app = typer.Typer(help="Measure servers, deployments and transports.", no_args_is_help=True)

Speculative = Annotated[str | None, typer.Option(help="JSON, as for vLLM.")]

app.command("serve", short_help="Throughput and latencies of a server under load.")(with_options(load_command))
app.command("handoff", short_help="Handoffs between two processes: time and hidden part.")(
    with_options(handoff_command)
)
app.command("transport", short_help="Copies to another process, over memcpy; planning time.")(transport_command)


@app.command("split", short_help="P/D beside one engine: first token and decode speed.")
def split_command(
    model: ModelArgument,
    speculative_config: Speculative = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")] = 512,
    num_pairs: Annotated[int, typer.Option(min=2, help="Requests to each side.")] = 30,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 32,
    kv_mode: Annotated[Mode, typer.Option(help="Who issues the copies: P or D.")] = "push",
    engine_flag: Annotated[list[str] | None, typer.Option(help="One more flag of the P/D engines.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Time to first token and decode speed of a P/D deployment and of one engine."""
    from baton.bench.serve import measure_deployments

    SpeculativeConfig.parse(speculative_config)
    figures = measure_deployments(
        checkpoint_directory(model),
        json.loads(speculative_config) if speculative_config else None,
        prompt_tokens,
        num_pairs,
        kv_mode,
        max_tokens,
        tuple(engine_flag or ()),
    )
    _show(dataclasses.asdict(figures), json_output)


@app.command("engine", short_help="Engine step over bare forward; speculative over plain.")
def engine_command(
    model: ModelArgument,
    speculative_config: Speculative = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests per step.")] = 1,
    json_output: JsonFlag = False,
) -> None:
    """Engine step over the bare model forward; with a drafter, speculative over plain decode."""
    from baton.bench.engine import speculative_over_plain, step_over_forward

    SpeculativeConfig.parse(speculative_config)
    model = checkpoint_directory(model)
    ratio, step, bare = step_over_forward(model, batch)
    figures = {"step_over_forward": ratio, "step_ms": step, "forward_ms": bare}
    if speculative_config is not None:
        ratio, fast, slow = speculative_over_plain(model, json.loads(speculative_config))
        figures |= {"speculative_over_plain": ratio, "speculative_tokens_per_s": fast, "plain_tokens_per_s": slow}
    _show(figures, json_output)


def _show(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}")
