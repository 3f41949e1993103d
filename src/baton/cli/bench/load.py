"""`baton bench serve`: benchmark a running server. Flags and JSON keys are vLLM's."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from baton.bench.load_generators import LoadTool, tool_command
from baton.cli.bench.load_options import DatasetOptions, ReportOptions, TargetOptions, TrafficOptions
from baton.cli.results import JsonFlag, make_place, show_table
from baton.errors import ConfigError, EngineUnavailableError
from baton.sampling_params import SamplingParams

if TYPE_CHECKING:
    from baton.bench.load import LoadRun

# Per request, only for --save-detailed.
_DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
_LISTS = (*_DETAILS, "latencies", "queue_times")
_COLUMNS = ("request_rate", "completed", "failed", "request_throughput", "request_goodput", "output_throughput")


@dataclass(frozen=True, slots=True)
class ReportedFigures:
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput: dict[str, float]


def load_command(
    target: TargetOptions,
    dataset: DatasetOptions,
    traffic: TrafficOptions,
    report: ReportOptions,
    tool: Annotated[
        Literal["baton", "vllm", "guidellm", "aiperf"],
        typer.Option(help="Program that sends the load; others than baton must be installed."),
    ] = "baton",
    json_output: JsonFlag = False,
) -> None:
    """Throughput and latencies of a server under load, as `vllm bench serve` reports them."""
    from baton.bench.load_figures import parse_goodput, parse_metrics, parse_percentiles
    from baton.bench.picture import check_picture, draw_sweep

    rates = _check(dataset, traffic, report)
    reported = ReportedFigures(
        parse_metrics(report.percentile_metrics),
        parse_percentiles(report.metric_percentiles),
        parse_goodput(report.goodput),
    )
    if tool != "baton":
        _hand_to(tool, target, dataset, traffic, report, json_output)
    if report.plot is not None:
        check_picture(report.plot)
    results = [_measure(target, _sized(dataset, one), one, report, reported, first=one is rates[0]) for one in rates]
    shown = [{name: value for name, value in result.items() if name not in _LISTS} for result in results]
    if json_output:
        print(json.dumps(shown[0] if traffic.sweep is None else {"sweep": shown}, indent=1))
    elif traffic.sweep is not None:
        show_table([{name: one.get(name) for name in (*_COLUMNS, *_columns(one))} for one in shown])
    else:
        for name, value in shown[0].items():
            print(f"{name:40} {value:.3f}" if isinstance(value, float) else f"{name:40} {value}")
    whole = results[0] if traffic.sweep is None else {"sweep": results}
    if report.save_result:
        _write(Path(report.result_dir or ".") / (report.result_filename or _filename(results[0], traffic)), whole)
    if report.plot is not None:
        draw_sweep({report.label or results[0]["model_id"]: results}, report.plot)


def _measure(
    target: TargetOptions,
    dataset: DatasetOptions,
    traffic: TrafficOptions,
    report: ReportOptions,
    asked: ReportedFigures,
    first: bool,
) -> dict[str, Any]:
    """Raises `EngineUnavailableError` if no request of the first rate is answered."""
    from baton.bench.load_figures import load_figures, spec_decode_figures

    run, tokenizer = asyncio.run(_run(target, dataset, traffic if first else replace(traffic, num_warmups=0)))
    figures = load_figures(run.outcomes, run.duration_s, asked.metrics, asked.percentiles, asked.goodput)
    for error in sorted({outcome.error for outcome in run.outcomes if outcome.error})[:10]:
        print(f"failed: {error}", file=sys.stderr)
    if first and not figures["completed"]:
        raise EngineUnavailableError(f"none of {len(run.outcomes)} requests was answered")
    if run.before is not None and run.after is not None:
        figures |= spec_decode_figures(run.before, run.after)
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": report.label,
        "model_id": run.model,
        "tokenizer_id": tokenizer,
        "num_prompts": dataset.num_prompts,
        "request_rate": traffic.request_rate if math.isfinite(traffic.request_rate) else "inf",
        "burstiness": traffic.burstiness if math.isfinite(traffic.burstiness) else "inf",
        "max_concurrency": traffic.max_concurrency,
        **figures,
    }
    return {name: value for name, value in result.items() if report.save_detailed or name not in _DETAILS}


def _hand_to(tool: LoadTool, *options: Any) -> NoReturn:
    *groups, json_output = options
    settings = {name: value for group in groups for name, value in asdict(group).items()}
    defaults = {f.name: f.default for group in groups for f in fields(group)}
    for name in ("sweep", "sweep_duration_s", "plot", "request_timeout_s"):
        if settings[name] != defaults[name]:
            raise ConfigError(name, f"is not supported with --tool {tool}")
    if json_output:
        raise ConfigError("json", f"is not supported with --tool {tool}, which prints its own report")
    command = tool_command(tool, settings, defaults)
    key = {} if settings["api_key"] is None else {"OPENAI_API_KEY": settings["api_key"]}
    raise typer.Exit(subprocess.run(command, env={**os.environ, **key}, check=False).returncode)


async def _run(target: TargetOptions, dataset: DatasetOptions, traffic: TrafficOptions) -> tuple[LoadRun, str]:
    import numpy as np

    from baton.bench.load import Load, run_load
    from baton.bench.load_requests import PrefixRepetition, RandomPrompts, arrival_times
    from baton.engine.loading.hub import checkpoint_directory
    from baton.openai.client import base_url, connected_client
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
        async with connected_client(url, 30.0, target.api_key) as client:
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
    due = arrival_times(dataset.num_prompts, traffic.request_rate, traffic.burstiness, random)
    load = Load(requests, due, traffic.max_concurrency, extra, traffic.request_timeout_s)
    model = target.served_model_name or name
    return await run_load(url, load, model, traffic.num_warmups, target.api_key), source


def _local(root: str | None) -> str:
    """A local directory. Hub names are not fetched: only users choose downloads."""
    if root is None or not os.path.isdir(root):
        raise ConfigError("tokenizer", f"must be given: the server's checkpoint is no directory here, but {root!r}")
    return root


def _check(dataset: DatasetOptions, traffic: TrafficOptions, report: ReportOptions) -> list[TrafficOptions]:
    for one in fields(dataset):
        kind = next((kind for kind in ("random", "prefix_repetition") if one.name.startswith(f"{kind}_")), None)
        if kind not in (None, dataset.dataset_name) and getattr(dataset, one.name) != one.default:
            raise ConfigError(one.name, f"is of --dataset-name {kind}, got {getattr(dataset, one.name)}")
    if traffic.temperature is not None:
        SamplingParams(temperature=traffic.temperature).check()
    if report.save_result:
        make_place(Path(report.result_dir or ".") / (report.result_filename or "result.json"), "result_dir")
    for name in ("request_rate", "burstiness"):
        if not getattr(traffic, name) > 0.0:
            raise ConfigError(name, f"must be above 0, got {getattr(traffic, name)}")
    if not 0.0 < traffic.request_timeout_s < math.inf:
        raise ConfigError("request_timeout_s", f"must be above 0 and finite, got {traffic.request_timeout_s}")
    if not report.save_result and (report.save_detailed or report.result_dir or report.result_filename):
        raise ConfigError("save_result", "is required with save_detailed, result_dir or result_filename")
    if traffic.sweep is None:
        for field, value in (("sweep_duration_s", traffic.sweep_duration_s), ("plot", report.plot)):
            if value is not None:
                raise ConfigError(field, "is only for a sweep: give --sweep")
        return [traffic]
    if math.isfinite(traffic.request_rate):
        raise ConfigError("request_rate", "must be left out with --sweep, which gives the rates")
    try:
        rates = [float(part) for part in traffic.sweep.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0.0 < rate < math.inf for rate in rates):
        raise ConfigError("sweep", f"must be rates above 0, such as 2,4,8, got {traffic.sweep!r}")
    if traffic.sweep_duration_s is not None and not 0.0 < traffic.sweep_duration_s < math.inf:
        raise ConfigError("sweep_duration_s", f"must be above 0 and finite, got {traffic.sweep_duration_s}")
    return [replace(traffic, request_rate=rate) for rate in rates]


def _sized(dataset: DatasetOptions, traffic: TrafficOptions) -> DatasetOptions:
    if traffic.sweep_duration_s is None:
        return dataset
    return replace(dataset, num_prompts=max(1, round(traffic.request_rate * traffic.sweep_duration_s)))


def _filename(result: dict[str, Any], traffic: TrafficOptions) -> str:
    rate = "sweep" if traffic.sweep is not None else f"{result['request_rate']}qps"
    many = "" if traffic.max_concurrency is None else f"-concurrency{traffic.max_concurrency}"
    model = result["model_id"].rstrip("/").rpartition("/")[2]
    return f"{result['label'] or 'openai'}-{rate}{many}-{model}-{result['date']}.json"


def _columns(result: dict[str, Any]) -> list[str]:
    return [name for name in result if name.endswith("_ms") and not name.startswith(("mean_", "std_"))]


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(result))
    except OSError as error:
        raise ConfigError("result_dir", f"cannot write {path}: {error.strerror}") from None
