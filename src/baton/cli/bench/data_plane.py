"""`baton bench handoff` and `baton bench transport`, which need no model."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from baton.cli.results import JsonFlag, OutputJson, make_place, parse_list, show_table, write_json
from baton.engine.config import parse_size
from baton.errors import ConfigError

# Block tables are planned before the pool is allocated.
_MAX_TOKENS = 1 << 20
_SHAPE = "Of the modelled target: "


@dataclass(frozen=True, slots=True)
class KVOptions:
    """As `ModelledKV`."""

    num_layers: Annotated[int, typer.Option(min=1, help=_SHAPE + "layers.")] = 16
    num_kv_heads: Annotated[int, typer.Option(min=1, help=_SHAPE + "heads of K and V.")] = 8
    head_dim: Annotated[int, typer.Option(min=1, help=_SHAPE + "width of a head.")] = 64
    dtype: Annotated[str, typer.Option(help=_SHAPE + "type of K and V.")] = "bfloat16"
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16
    kv_layout: Annotated[
        Literal["block", "layer"], typer.Option(help="A page has all layers together, or each layer its pages.")
    ] = "block"


@dataclass(frozen=True, slots=True)
class HandoffOptions:
    num_tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "512,2048,8192"
    fragmentation: Annotated[str, typer.Option(help="Order of pages: fresh, churned by a thousand requests, full.")] = (
        "fresh,churned,full"
    )
    prefill_tensor_parallel_size: Annotated[int, typer.Option(help="Ranks of P.")] = 1
    decode_tensor_parallel_size: Annotated[int, typer.Option(help="Ranks of D.")] = 1
    kv_transport: Annotated[str, typer.Option(help="shm, nixl, mooncake, file or a URI.")] = "shm"
    kv_mode: Annotated[Literal["push", "pull"], typer.Option(help="Who issues the copies: P or D.")] = "push"
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk of the prefill.")] = 512
    prefill_rate: Annotated[float, typer.Option(help="Tokens a second that the prefill is said to compute.")] = 2e4
    num_iters: Annotated[int, typer.Option(min=1, help="Rounds.")] = 15


def handoff_command(
    kv: KVOptions, options: HandoffOptions, output_json: OutputJson = None, json_: JsonFlag = False
) -> None:
    """Time, runs and hidden part of handoffs between two processes, by length and order of pages."""
    from baton.bench.handoff import Pace, Topology, measure_handoffs
    from baton.bench.modelled import ModelledKV, check_modelled
    from baton.deployment import check_shared_transport

    check_shared_transport(options.kv_transport)
    if output_json is not None:
        make_place(output_json, "output_json")
    if not 0.0 < options.prefill_rate < float("inf"):
        raise ConfigError("prefill_rate", f"must be above 0 and finite, got {options.prefill_rate}")
    modelled = ModelledKV(
        num_layers=kv.num_layers,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        dtype=kv.dtype,
        block_size=kv.block_size,
        layout=kv.kv_layout,
    )
    sizes = ("prefill_tensor_parallel_size", "decode_tensor_parallel_size")
    check_modelled(modelled, {name: getattr(options, name) for name in sizes})
    topology = Topology(
        options.prefill_tensor_parallel_size,
        options.decode_tensor_parallel_size,
        options.kv_transport,
        options.kv_mode,
    )
    orders = [word.strip() for word in options.fragmentation.split(",")]
    lengths = parse_list(options.num_tokens, "num_tokens", _MAX_TOKENS)
    pace = Pace(options.max_num_batched_tokens, options.prefill_rate)
    rows = [
        dataclasses.asdict(f) for f in measure_handoffs(modelled, topology, pace, lengths, orders, options.num_iters)
    ]
    settings = dataclasses.asdict(kv) | dataclasses.asdict(options)
    _write_result({**settings, "handoffs": rows}, rows, output_json, json_)


def transport_command(
    kv_transport: Annotated[str, typer.Option(help="Names or URIs, or all: those that run here.")] = "all",
    size: Annotated[str, typer.Option(help="Bytes of a copy.")] = "4K,64K,1M,16M,64M",
    run_size: Annotated[str, typer.Option(help="Bytes of its contiguous runs; at most the copy's.")] = "4K,32K,1M",
    num_iters: Annotated[int, typer.Option(min=1, help="Most rounds; a slow transport has fewer.")] = 21,
    output_json: OutputJson = None,
    json_: JsonFlag = False,
) -> None:
    """Copies to another process over memcpy, by transport, size and length of runs; and planning time."""
    from baton.bench.transport import ALL, measure_copies, measure_planning, runnable_transports
    from baton.deployment import check_shared_transport

    if output_json is not None:
        make_place(output_json, "output_json")
    sizes, runs = (_sizes(text, name) for text, name in ((size, "size"), (run_size, "run_size")))
    uris = ALL if kv_transport == "all" else [uri.strip() for uri in kv_transport.split(",")]
    for uri in uris:
        check_shared_transport(uri)
    if kv_transport == "all":
        uris, missing = runnable_transports(uris)
        for uri, why in missing.items():
            print(f"{uri} is not measured: {why}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for uri in uris:
        found = [dataclasses.asdict(figures) for figures in measure_copies(uri, sizes, runs, num_iters)]
        # memcpy's rows are the same for all transports.
        rows += [row for row in found if not rows or row["transport"] != "memcpy"]
    planning = measure_planning()
    _write_result({"copies": rows, **planning}, rows, output_json, json_)
    if not json_:
        print("\n".join(f"{name:20} {value:.3f}" for name, value in planning.items()))


def _sizes(text: str, field: str) -> list[int]:
    values = sorted({parse_size(part.strip(), field) for part in text.split(",")})
    if values[0] < 1:
        raise ConfigError(field, f"must be at least 1, got {text!r}")
    return values


def _write_result(result: dict[str, Any], rows: list[dict[str, Any]], output_json: str | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        show_table(rows)
    if output_json is not None:  # may fail
        write_json(output_json, result)
