"""The flags of `baton bench serve`. Names and defaults are vLLM's, except for sweeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, slots=True)
class TargetOptions:
    base_url: Annotated[str, typer.Option(help="Server or router.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="Name to ask for; default: the first that is served.")] = None
    served_model_name: Annotated[str | None, typer.Option(help="Name to ask for, where --model is a path.")] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint whose vocabulary prompts are of; default: --model, else the directory the server names."
        ),
    ] = None
    api_key: Annotated[str | None, typer.Option(envvar="BATON_API_KEY", help="Bearer token.")] = None


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    dataset_name: Annotated[Literal["random", "prefix_repetition"], typer.Option(help="Kind of prompts.")] = "random"
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 1000
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, lengths and arrivals.")] = 0
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt after the shared prefix.")] = 1024
    random_output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128
    random_range_ratio: Annotated[float, typer.Option(help="Lengths differ by up to this fraction, each way.")] = 0.0
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0
    prefix_repetition_prefix_len: Annotated[int, typer.Option(help="Tokens of a prefix.")] = 256
    prefix_repetition_suffix_len: Annotated[int, typer.Option(help="Tokens of a prompt after its prefix.")] = 256
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(help="Prefixes that prompts share.")] = 10
    prefix_repetition_output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    request_rate: Annotated[float, typer.Option(help="Requests a second; inf: all at once.")] = math.inf
    sweep: Annotated[str | None, typer.Option(help="Several request rates, measured one after the other: '2,4,8'.")] = (
        None
    )
    sweep_duration_s: Annotated[
        float | None, typer.Option(help="Seconds at each rate of a sweep, instead of --num-prompts.")
    ] = None
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: bursts; inf: even gaps.")] = 1.0
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in flight.")] = None
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before those that are measured.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers have their full length.")] = False
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; default: the server's.")] = None
    request_timeout_s: Annotated[float, typer.Option(help="An answer that takes longer has failed.")] = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class ReportOptions:
    percentile_metrics: Annotated[
        str,
        typer.Option(help="Metrics to report: ttft, tpot, itl, e2el, client_queue_time, handoff, handoff_overhead."),
    ] = "ttft,tpot,itl"
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of these metrics.")] = "99"
    goodput: Annotated[str | None, typer.Option(help="Limits in milliseconds: 'ttft:200 tpot:20 e2el:2000'.")] = None
    label: Annotated[str | None, typer.Option(help="Label of the run, kept in the result.")] = None
    save_result: Annotated[bool, typer.Option("--save-result", help="Write a JSON file.")] = False
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Each request's figures in the JSON file too.")
    ] = False
    result_dir: Annotated[str | None, typer.Option(help="Directory of the JSON file.")] = None
    result_filename: Annotated[
        str | None, typer.Option(help="Name of the JSON file; default: rate, model and date.")
    ] = None
    plot: Annotated[str | None, typer.Option(help="Draw a sweep into this .png file.")] = None
