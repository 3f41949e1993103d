"""The `baton verify` command."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from baton.engine.config import Integrity, SpeculativeConfig
from baton.errors import ConfigError
from baton.text import Tokenizer
from baton.transports.registry import parse_uri
from baton.verify.compare import Report, compare
from baton.verify.observe import Case, Observed, make_cases, observe_in_process, observe_url, served_model
from baton.verify.report import format_reports
from baton.wire import Recovery, SamplingParams

MODES = ("push", "pull", "single-nospec")


def parse_lengths(text: str) -> list[int]:
    """`1-4,9` -> [1, 2, 3, 4, 9]. Raises ConfigError."""
    lengths: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            low, high = int(first), int(last or first)
        except ValueError:
            raise ConfigError("lengths", f"must be like 1-96 or 1,5,9, got {text!r}") from None
        if not 1 <= low <= high <= 1_000_000:
            raise ConfigError("lengths", f"must be rising and positive, got {text!r}")
        lengths += range(low, high + 1)
    return lengths


def parse_modes(text: str) -> list[str]:
    """Comma-separated names of MODES. Raises ConfigError."""
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise ConfigError("modes", f"must be of {', '.join(MODES)}, got {mode!r}")
    return modes


def verify_command(
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory; not with --candidate.")] = None,
    speculative_config: Annotated[str | None, typer.Option(help="JSON, as for vLLM.")] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, like 1-96 or 5,17.")] = "1-96",
    modes: Annotated[str, typer.Option(help="Of push, pull, single-nospec.")] = "push,pull,single-nospec",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 32,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    logprobs: Annotated[int, typer.Option(help="Alternatives per token to ask for.")] = 0,
    logprob_tolerance: float = 1e-4,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at the deployment.")] = 1,
    prefill: Annotated[int, typer.Option(help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode engines.")] = 1,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 64,
    kv_cache_memory: Annotated[
        int | None, typer.Option(help="Bytes of KV per engine of the deployment; the reference keeps the default.")
    ] = None,
    dtype: str = "auto",
    device: str = "cpu",
    kv_transport: Annotated[str, typer.Option(help="Of the deployment: shm, nixl, mooncake, file or a URI.")] = "shm",
    integrity: Annotated[Integrity, typer.Option(help="Of the deployment: off, sampled or full.")] = "off",
    recovery: Annotated[Recovery, typer.Option(help="Of the deployment; without it a broken handoff shows.")] = "none",
    batch_invariant: bool = True,
    reference: Annotated[str | None, typer.Option(help="URL of a reference that runs already.")] = None,
    candidate: Annotated[str | None, typer.Option(help="URL of a deployment that runs already.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
) -> None:
    """Send the same requests to a reference and a deployment; exit 1 on any difference."""
    chosen = parse_modes(modes)
    parse_uri(kv_transport)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        logprobs=logprobs,
    ).check()
    if model is None:
        raise ConfigError("model", "is required (also with --candidate: its tokenizer makes the prompts)")
    cases = make_cases(Tokenizer.load(model), parse_lengths(lengths), params)
    engine: dict[str, Any] = {
        "block_size": block_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "dtype": dtype,
        "device": device,
        "batch_invariant": batch_invariant,
    }
    spec = SpeculativeConfig.parse(speculative_config)
    spec_json = json.loads(speculative_config) if speculative_config else None

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if reference is not None:
        say(f"reference: {reference}")
        want = asyncio.run(_observe_served(reference, cases, concurrency))
    else:
        say(f"reference: one engine in this process, {len(cases)} requests")
        want = observe_in_process({"model": model, "speculative_config": spec_json, **engine}, cases)
    reports: list[Report] = []
    if "single-nospec" in chosen and candidate is None:
        say("single-nospec: one engine in this process, without speculation")
        have = observe_in_process({"model": model, **engine}, cases)
        reports.append(compare("single-nospec", cases, want, have, logprob_tolerance))
    handoff_modes = [mode for mode in chosen if mode != "single-nospec"]
    if candidate is not None:
        say(f"candidate: {candidate}")
        have = asyncio.run(_observe_served(candidate, cases, concurrency))
        reports.append(compare("candidate", cases, want, have, logprob_tolerance))
    elif handoff_modes:
        flags = _engine_flags(engine, speculative_config if spec else None, kv_cache_memory)
        # A handoff that fails must show: recomputed on the decode engine, it would give the same answer.
        flags += ["--integrity", integrity, "--recovery", recovery]
        reports += _verify_deployment(
            model,
            cases,
            want,
            handoff_modes,
            (prefill, decode),
            flags,
            kv_transport,
            recovery,
            concurrency,
            logprob_tolerance,
            say,
        )
    order = {mode: position for position, mode in enumerate(chosen)}
    reports.sort(key=lambda report: order.get(report.mode, -1))
    if json_output:
        print(json.dumps([_as_json(report) for report in reports], indent=1))
    else:
        print(format_reports(reports))
    if any(report.num_identical != report.num_cases for report in reports):
        raise typer.Exit(1)


async def _observe_served(url: str, cases: Sequence[Case], concurrency: int) -> list[Observed]:
    url = url.rstrip("/").removesuffix("/v1")
    return await observe_url(url, await served_model(url), cases, concurrency)


def _engine_flags(engine: dict[str, Any], speculative_config: str | None, kv_cache_memory: int | None) -> list[str]:
    flags: list[str] = []
    for name, value in engine.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags += [option] if value else []
        else:
            flags += [option, str(value)]
    if speculative_config is not None:
        flags += ["--speculative-config", speculative_config]
    if kv_cache_memory is not None:
        flags += ["--kv-cache-memory", str(kv_cache_memory)]
    return flags


def _verify_deployment(
    model: str,
    cases: Sequence[Case],
    want: Sequence[Observed],
    modes: Sequence[str],
    size: tuple[int, int],
    flags: list[str],
    kv_transport: str,
    recovery: Recovery,
    concurrency: int,
    tolerance: float,
    say: Any,
) -> list[Report]:
    from baton.processes import Deployment

    reports = []
    prefill, decode = size
    for mode in modes:
        # A fresh deployment per mode: the second mode would else find the first one's pages in its prefix cache.
        say(f"{mode}: starting {prefill} prefill and {decode} decode engines")
        with Deployment(
            model,
            prefill=prefill,
            decode=decode,
            engine_flags=flags,
            kv_transport=kv_transport,
            router_flags=["--kv-mode", mode, "--recovery", recovery],
        ) as deployment:
            name = asyncio.run(served_model(deployment.url))
            have = asyncio.run(observe_url(deployment.url, name, cases, concurrency))
        reports.append(compare(mode, cases, want, have, tolerance))
    return reports


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "mode": report.mode,
        "requests": report.num_cases,
        "identical": report.num_identical,
        "acceptance": report.acceptance,
        "reference_acceptance": report.reference_acceptance,
        "differences": [str(difference) for difference in report.differences],
    }
