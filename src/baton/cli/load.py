"""The `baton bench serve` command: a load on a server that runs already. Flags and JSON keys are vLLM's."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from baton.errors import ConfigError, EngineUnavailableError

# Lists with an entry for each request: of interest beside --save-detailed alone.
_DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
_LISTS = (*_DETAILS, "latencies", "queue_times")


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Who is asked."""

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
    """What is asked."""

    dataset_name: Annotated[Literal["random", "prefix_repetition"], typer.Option(help="Kind of prompts.")] = "random"
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 1000
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths and arrivals.")] = 0
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt behind the shared ones.")] = 1024
    random_output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128
    random_range_ratio: Annotated[float, typer.Option(help="Lengths differ by up to this part, each way.")] = 0.0
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0
    prefix_repetition_prefix_len: Annotated[int, typer.Option(help="Tokens of a prefix.")] = 256
    prefix_repetition_suffix_len: Annotated[int, typer.Option(help="Tokens of a prompt behind its prefix.")] = 256
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(help="Prefixes that prompts share.")] = 10
    prefix_repetition_output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """When it is asked."""

    request_rate: Annotated[float, typer.Option(help="Requests a second; inf: all at once.")] = math.inf
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: bursts; inf: even gaps.")] = 1.0
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in flight.")] = None
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before those that are measured.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers have their full length.")] = False
    temperature: Annotated[float | None, typer.Option(help="Default: the server's.")] = None


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is told."""

    percentile_metrics: Annotated[
        str, typer.Option(help="Of ttft, tpot, itl, e2el, client_queue_time, handoff, handoff_overhead.")
    ] = "ttft,tpot,itl"
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of these.")] = "99"
    goodput: Annotated[str | None, typer.Option(help="Milliseconds: 'ttft:200 tpot:20 e2el:2000'.")] = None
    label: Annotated[str | None, typer.Option(help="Kept in the result.")] = None
    save_result: Annotated[bool, typer.Option("--save-result", help="Write a JSON file.")] = False
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Each request's figures in it.")] = False
    result_dir: Annotated[str | None, typer.Option(help="Its directory.")] = None
    result_filename: Annotated[str | None, typer.Option(help="Its name; default: rate, model and date.")] = None


def load_command(
    target: TargetOptions,
    dataset: DatasetOptions,
    traffic: TrafficOptions,
    report: ReportOptions,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Throughput and latencies of a server under load, as `vllm bench serve` tells them."""
    from baton.bench.load_figures import (
        load_figures,
        parse_goodput,
        parse_metrics,
        parse_percentiles,
        spec_decode_figures,
    )

    metrics, percentiles = parse_metrics(report.percentile_metrics), parse_percentiles(report.metric_percentiles)
    goodput = parse_goodput(report.goodput)
    _check(traffic)
    if not report.save_result and (report.save_detailed or report.result_dir or report.result_filename):
        raise ConfigError("save_result", "nothing is written without it")
    run, tokenizer = asyncio.run(_run(target, dataset, traffic))
    figures = load_figures(run.outcomes, run.duration_s, metrics, percentiles, goodput)
    for error in sorted({outcome.error for outcome in run.outcomes if outcome.error})[:10]:
        print(f"failed: {error}", file=sys.stderr)
    if not figures["completed"]:
        raise EngineUnavailableError(f"none of {len(run.outcomes)} requests was answered")
    if run.before is not None and run.after is not None:
        figures |= spec_decode_figures(run.before, run.after)
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    rate: float | str = traffic.request_rate if math.isfinite(traffic.request_rate) else "inf"
    result: dict[str, Any] = {
        "date": date,
        "endpoint_type": "openai",
        "backend": "openai",
        "label": report.label,
        "model_id": run.model,
        "tokenizer_id": tokenizer,
        "num_prompts": dataset.num_prompts,
        "request_rate": rate,
        "burstiness": traffic.burstiness if math.isfinite(traffic.burstiness) else "inf",
        "max_concurrency": traffic.max_concurrency,
        **figures,
    }
    if not report.save_detailed:
        result = {name: value for name, value in result.items() if name not in _DETAILS}
    if report.save_result:
        model = run.model.rstrip("/").rpartition("/")[2]
        many = "" if traffic.max_concurrency is None else f"-concurrency{traffic.max_concurrency}"
        name = report.result_filename or f"{report.label or 'openai'}-{rate}qps{many}-{model}-{date}.json"
        _write(Path(report.result_dir or ".") / name, result)
    shown = {name: value for name, value in result.items() if name not in _LISTS}
    if json_output:
        print(json.dumps(shown, indent=1))
        return
    for name, value in shown.items():
        print(f"{name:40} {value:.3f}" if isinstance(value, float) else f"{name:40} {value}")


async def _run(target: TargetOptions, dataset: DatasetOptions, traffic: TrafficOptions) -> tuple[Any, str]:
    """The run, and the checkpoint of the vocabulary."""
    import numpy as np

    from baton.bench.load import Load, run_load
    from baton.bench.prompts import PrefixRepetition, RandomPrompts, arrivals
    from baton.engine.hub import checkpoint_directory
    from baton.openai.client import base_url, connected
    from baton.text import Tokenizer

    prompts: RandomPrompts | PrefixRepetition
    if dataset.dataset_name == "random":
        prompts = RandomPrompts(
            dataset.random_input_len,
            dataset.random_output_len,
            dataset.random_range_ratio,
            dataset.random_prefix_len,
        )
    else:
        prompts = PrefixRepetition(
            dataset.prefix_repetition_prefix_len,
            dataset.prefix_repetition_suffix_len,
            dataset.prefix_repetition_num_prefixes,
            dataset.prefix_repetition_output_len,
        )
    prompts.check()
    url, name, source = base_url(target.base_url, "base_url"), target.model, target.tokenizer or target.model
    if name is None or source is None:
        async with connected(url, 30.0, target.api_key) as client:
            served = await client.model()
        name, source = name or served.id, source or _local(served.root)
    random = np.random.default_rng(dataset.seed)
    tokenizer = Tokenizer.load(checkpoint_directory(source, field="tokenizer"))
    vocabulary = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    if not vocabulary:
        raise ConfigError("tokenizer", f"{source} has no tokens but special ones")
    extra: dict[str, Any] = {"ignore_eos": True} if traffic.ignore_eos else {}
    if traffic.temperature is not None:
        extra["temperature"] = traffic.temperature
    requests = prompts.make(dataset.num_prompts, vocabulary, random)
    due = arrivals(dataset.num_prompts, traffic.request_rate, traffic.burstiness, random)
    load = Load(requests, due, traffic.max_concurrency, extra)
    asked = target.served_model_name or name
    return await run_load(url, load, asked, traffic.num_warmups, target.api_key), source


def _local(root: str | None) -> str:
    """Where the server says its checkpoint is. What it names on the hub is not fetched: users choose what they load."""
    if root is None or not os.path.isdir(root):
        raise ConfigError("tokenizer", f"must be given: the server's checkpoint is no directory here, but {root!r}")
    return root


def _check(traffic: TrafficOptions) -> None:
    for name in ("request_rate", "burstiness"):
        if not getattr(traffic, name) > 0.0:
            raise ConfigError(name, f"must be above 0, got {getattr(traffic, name)}")


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
    except OSError as error:
        raise ConfigError("result_dir", f"cannot write {path}: {error.strerror}") from None
