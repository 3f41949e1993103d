"""Runs another installed load generator with the same settings: `--tool` of `baton bench serve`.

Commands are those of vLLM 0.32, guidellm 0.8 and aiperf 0.13. A flag without an equivalent is refused.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from baton.errors import ConfigError

LoadTool = Literal["vllm", "guidellm", "aiperf"]

# vLLM's flags of the same names: those with a value, and switches.
_VLLM_VALUES = (
    "base_url",
    "model",
    "served_model_name",
    "tokenizer",
    "dataset_name",
    "num_prompts",
    "seed",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "random_prefix_len",
    "prefix_repetition_prefix_len",
    "prefix_repetition_suffix_len",
    "prefix_repetition_num_prefixes",
    "prefix_repetition_output_len",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "num_warmups",
    "temperature",
    "percentile_metrics",
    "metric_percentiles",
    "label",
    "result_dir",
    "result_filename",
)
_VLLM_SWITCHES = ("ignore_eos", "save_result", "save_detailed")
# Flags without an equivalent in guidellm and aiperf.
_OURS = (
    "save_result",
    "save_detailed",
    "result_dir",
    "result_filename",
    "label",
    "goodput",
    "percentile_metrics",
    "metric_percentiles",
    "temperature",
    "served_model_name",
)


def tool_command(tool: LoadTool, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """`tool`'s command for the load of `settings`: flags of `baton bench serve` by name.

    Raises `ConfigError` for a setting that the tool lacks, or a missing tool.
    """
    build: dict[LoadTool, Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]]] = {
        "vllm": _vllm,
        "guidellm": _guidellm,
        "aiperf": _aiperf,
    }
    arguments = build[tool](settings, defaults)
    beside = Path(sys.executable).parent / tool
    program = shutil.which(tool) or (str(beside) if beside.exists() else None)
    if program is None:
        raise ConfigError("tool", f"{tool} is not installed: there is no command {tool!r}; pip install {tool}")
    return [program, *arguments]


def _vllm(settings: Mapping[str, Any], _: Mapping[str, Any]) -> list[str]:
    for metric in settings["percentile_metrics"].split(","):
        if metric.startswith("handoff"):
            raise ConfigError("percentile_metrics", f"vllm does not know {metric!r}")
    out = ["bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"]
    for name in _VLLM_VALUES:
        if settings[name] is not None:
            out += [_flag(name), str(settings[name])]
    out += [_flag(name) for name in _VLLM_SWITCHES if settings[name]]
    if settings["goodput"]:
        out += ["--goodput", *settings["goodput"].replace(",", " ").split()]
    return out


def _guidellm(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    _refuse("guidellm", settings, defaults, (*_OURS, "num_warmups", "api_key", "seed"))
    many, rate = settings["max_concurrency"], settings["request_rate"]
    if settings["ignore_eos"]:
        raise ConfigError("ignore_eos", "must be left out: guidellm always sets it")
    limit = "" if many is None else f",max_concurrency={many}"
    if math.isfinite(rate):
        kind = "constant" if math.isinf(settings["burstiness"]) else "poisson"
        if kind == "poisson" and settings["burstiness"] != 1.0:
            raise ConfigError("burstiness", "must be 1 or inf with --tool guidellm")
        profile = f"kind={kind},rate={rate:g}{limit}"
    else:
        profile = f"kind=throughput{limit}" if many is None else f"kind=concurrent,streams={many}"
    prompt, output, prefix, _ = _lengths("guidellm", settings)
    data = f"kind=synthetic_text,prompt_tokens={prompt},output_tokens={output}"
    if prefix:
        field = "random_prefix_len" if settings["dataset_name"] == "random" else "dataset_name"
        raise ConfigError(field, "--tool guidellm has no prompts that share a prefix")
    backend = f"kind=openai_http,target={settings['base_url']},request_format=/v1/completions"
    if settings["model"] is not None:
        backend += f",model={settings['model']}"
    out = ["run", "--backend", backend, "--profile", profile, "--data", data]
    out += ["--constraint", f"kind=max_requests,count={settings['num_prompts']}"]
    if settings["tokenizer"] is not None:
        out += ["--tokenizer", f"kind=huggingface_auto,model={settings['tokenizer']}"]
    return out


def _aiperf(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    _refuse("aiperf", settings, defaults, _OURS)
    if settings["model"] is None:
        raise ConfigError("model", "must be given: aiperf does not ask the server")
    prompt, output, prefix, count = _lengths("aiperf", settings)
    out = ["profile", "--url", settings["base_url"], "--model", settings["model"], "--endpoint-type", "completions"]
    out += ["--streaming", "--isl", str(prompt), "--osl", str(output), "--ui", "none"]
    out += ["--request-count", str(settings["num_prompts"]), "--random-seed", str(settings["seed"])]
    if prefix:
        out += ["--prefix-prompt-length", str(prefix), "--num-prefix-prompts", str(count)]
    if math.isfinite(settings["request_rate"]):
        out += ["--request-rate", str(settings["request_rate"]), "--arrival-pattern"]
        bursts = settings["burstiness"]
        if math.isinf(bursts):
            out += ["constant"]
        else:
            out += ["poisson"] if bursts == 1.0 else ["gamma", "--arrival-smoothness", str(bursts)]
    if settings["max_concurrency"] is not None or not math.isfinite(settings["request_rate"]):
        out += ["--concurrency", str(settings["max_concurrency"] or settings["num_prompts"])]
    for ours, theirs in (("tokenizer", "--tokenizer"), ("api_key", "--api-key")):
        if settings[ours] is not None:
            out += [theirs, settings[ours]]
    if settings["num_warmups"]:
        out += ["--warmup-request-count", str(settings["num_warmups"])]
    if settings["ignore_eos"]:
        out += ["--extra-inputs", "ignore_eos:true"]
    return out


def _lengths(tool: LoadTool, settings: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Tokens of a prompt after its prefix, of an answer and of a prefix, and the number of prefixes."""
    if settings["random_range_ratio"]:
        raise ConfigError("random_range_ratio", f"must be 0 with --tool {tool}, which has no uniform lengths")
    if settings["dataset_name"] == "random":
        names = ("random_input_len", "random_output_len", "random_prefix_len")
        prompt, output, prefix = (settings[name] for name in names)
        return prompt, output, prefix, 1
    parts = ("suffix_len", "output_len", "prefix_len", "num_prefixes")
    prompt, output, prefix, count = (settings[f"prefix_repetition_{part}"] for part in parts)
    return prompt, output, prefix, count


def _refuse(tool: LoadTool, settings: Mapping[str, Any], defaults: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if settings[name] != defaults[name]:
            raise ConfigError(name, f"is not supported with --tool {tool}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
