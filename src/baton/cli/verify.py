"""The `baton verify` command."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import msgspec
import typer

from baton.cli.options import to_flags, with_options
from baton.cli.roles import RoleOptions
from baton.deployment import Deployment, check_shared_transport
from baton.engine.config import EngineConfig, KVTransferConfig, StepSettings, declared_settings
from baton.engine.loading.hub import checkpoint_directory
from baton.engine.memory.sizes import check_sizes
from baton.errors import ConfigError
from baton.sampling_params import MAX_LOGPROBS, SamplingParams
from baton.setting import MAX_SECONDS
from baton.verify.case_options import DEFAULT_LENGTHS, MODES, Bounds, choose_cases, find_bos, parse_modes
from baton.verify.compare import compare_answers
from baton.verify.observe import REQUEST_TIMEOUT_S, Case, next_turns
from baton.verify.prompts import num_doubled
from baton.verify.report import format_reports, report_json
from baton.verify.sides import Answers, DeploymentSide, EngineSide, ServerSide
from baton.wire import Recovery

_OF_DEPLOYMENT = (
    "kv_cache_memory",
    "integrity",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)
_Engines = Annotated[int, typer.Option(min=1, help="Engines of that role in the deployment.")]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    reference: Annotated[str | None, typer.Option(help="URL of a server; default: one engine in this process.")] = None
    candidate: Annotated[str | None, typer.Option(help="URL of a server; default: a deployment of MODEL.")] = None
    reference_metrics: Annotated[
        str | None, typer.Option(metavar="URL,...", help="Servers whose counters give the reference's acceptance.")
    ] = None
    candidate_metrics: Annotated[
        str | None,
        typer.Option(metavar="URL,...", help="The same of the candidate: a P/D deployment's decode engines."),
    ] = None
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at a server.")] = 1
    request_timeout: Annotated[float, typer.Option(min=0.001, max=MAX_SECONDS, help="Seconds.")] = REQUEST_TIMEOUT_S
    api_key: Annotated[str | None, typer.Option(envvar="BATON_API_KEY", help="Bearer token for both servers.")] = None

    def side(self, name: str) -> ServerSide | None:
        """Raises `ConfigError`."""
        url, metrics = getattr(self, name), getattr(self, f"{name}_metrics")
        return ServerSide.parse(name, url, metrics, self.api_key, self.request_timeout, self.concurrency)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    lengths: Annotated[str | None, typer.Option(help=f"Prompt lengths in tokens [default: {DEFAULT_LENGTHS}].")] = None
    prompts: Annotated[str | None, typer.Option(help="File of prompts: lines of text, or of JSON if *.jsonl.")] = None
    chat: Annotated[
        str | None, typer.Option(metavar="FILE", help='Lines of {"messages": [...]}, for /v1/chat/completions.')
    ] = None
    add_special_tokens: Annotated[
        bool,
        typer.Option(
            "--add-special-tokens/--no-add-special-tokens",
            help="For texts of --prompts: whether the tokenizer adds BOS; say no if a template wrote it.",
        ),
    ] = True
    turns: Annotated[
        int, typer.Option(min=1, help="Turns of each conversation: prefixes are handed back to prefill engines.")
    ] = 1
    token_range: Annotated[
        str, typer.Option(help="Ids of random prompts, without MODEL; servers must have them all.")
    ] = "100-30000"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Names are those of `SamplingParams`."""

    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 32
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Annotated[int, typer.Option(help="Seed of sampling, and of random prompts.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-sequence token.")] = False
    logprobs: Annotated[int, typer.Option(min=0, max=MAX_LOGPROBS, help="Alternatives per token to ask for.")] = 0


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    modes: Annotated[
        str | None,
        typer.Option(
            help=f"Some of {', '.join(MODES)} [default: the first three]; with --candidate: kv_mode to ask for."
        ),
    ] = None
    json_output: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False
    near_tie: Annotated[
        float | None,
        typer.Option(help="Accept another token whose logprob is this near the best [default: 1e-4 of servers]."),
    ] = None
    logprob_tolerance: Annotated[
        float | None, typer.Option(help="[default: 1e-4; of servers, logprobs are not compared]")
    ] = None
    acceptance_tolerance: Annotated[
        float, typer.Option(help="Accepted drafts per round that may differ, at each position.")
    ] = 0.01

    def bounds(self, servers: ServerOptions, sampling: SamplingOptions) -> Bounds:
        return Bounds.parse(
            near_tie=self.near_tie,
            logprob_tolerance=self.logprob_tolerance,
            acceptance_tolerance=self.acceptance_tolerance,
            acceptance_required=servers.reference_metrics is not None or servers.candidate_metrics is not None,
            servers=servers.reference is not None or servers.candidate is not None,
            temperature=sampling.temperature,
        )


@dataclass(frozen=True, slots=True)
class DeploymentOptions(RoleOptions):
    prefill: _Engines = 1
    decode: _Engines = 1
    kv_transport: Annotated[str, typer.Option(help="Of the deployment: shm, nixl, mooncake, file or a URI.")] = "shm"
    recovery: Annotated[Recovery, typer.Option(help="Of the deployment; without it a broken handoff shows.")] = "none"
    batch_invariant: bool = True


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A server, or what verify starts in each mode. `settings`: of one engine."""

    server: ServerSide | None
    settings: Mapping[str, Any]
    deployment: DeploymentSide
    cases: Sequence[Case]
    undo: contextlib.ExitStack
    running: list[Deployment] = field(default_factory=list)

    def answers(self, mode: str) -> Answers:
        if self.server is not None:
            _print_status(f"{mode}: {self.server.url}")
            return self.server.answers(self.cases, kv_mode=mode if mode in MODES else None)
        if mode in ("push", "pull"):
            side = self.deployment
            if not self.running:
                _print_status(f"{mode}: starting {side.prefill} prefill and {side.decode} decode engines")
                self.running.append(self.undo.enter_context(side.start()))
            answers = side.answers(self.running[0], self.cases, mode)
            if side.hands_back:
                _print_status(f"{mode}: {answers.num_handed_back} prefixes were handed back")
            return answers
        _print_status(f"{mode}: one engine in this process")
        settings = _without_drafter(self.settings) if mode == "single-nospec" else self.settings
        return EngineSide(settings).answers(self.cases)


@with_options
def verify_command(
    context: typer.Context,
    comparison: ComparisonOptions,
    servers: ServerOptions,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    engine: StepSettings,
    started: DeploymentOptions,
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint of what verify starts: a directory, or ORG/NAME on the hub.")
    ] = None,
) -> None:
    """Send the same requests to a reference and a candidate; exit 1 on any difference.

    Each is what verify starts from MODEL, or any OpenAI-compatible server.
    """
    check_shared_transport(started.kv_transport)
    engine = started.alike(engine, started.batch_invariant)
    chosen = parse_modes(comparison.modes, servers.candidate is not None)
    _check_started(context, servers, engine, started, chosen, model)
    want, have = servers.side("reference"), servers.side("candidate")
    if model is None and (want is None or have is None):
        raise ConfigError("model", "is required, except with both --reference and --candidate")
    model = model and checkpoint_directory(model)
    bounds = comparison.bounds(servers, sampling)
    params = SamplingParams(**asdict(sampling)).check()
    if bounds.near_tie:
        params = msgspec.structs.replace(params, logprobs=max(sampling.logprobs, 2))
    settings = _reference_settings(engine, model, started.batch_invariant)
    deployment = DeploymentSide(
        model or "",
        started.prefill,
        started.decode,
        (*to_flags(engine), "--batch-invariant" if started.batch_invariant else "--no-batch-invariant"),
        started.flags(),
        started.kv_transport,
        started.recovery,
        servers.concurrency,
        started.data_ranks(engine),
        hands_back=prompts.turns > 1,
    )
    if prompts.turns > 1 and prompts.chat is not None:
        raise ConfigError("turns", "must be 1 with --chat, whose lines are whole conversations")
    texts = {name: value for name, value in asdict(prompts).items() if name != "turns"}
    cases = choose_cases(model, want or have, **texts, params=params)
    _print_status(f"reference: {want.url if want else 'one engine in this process'}, {len(cases)} requests")
    reference = functools.partial(want.answers, salted=True) if want else EngineSide(settings).answers
    cases, expected = _converse(reference, cases, prompts.turns)
    if prompts.prompts is not None or prompts.chat is not None:
        _warn_of_bos(cases, expected, find_bos(model, want or have), prompts.prompts is not None)
    with contextlib.ExitStack() as undo:
        candidate = _Candidate(have, settings, deployment, cases, undo)
        if not _print_reports(cases, expected, chosen, candidate.answers, bounds, comparison.json_output):
            raise typer.Exit(1)


def _check_started(
    context: typer.Context,
    servers: ServerOptions,
    engine: StepSettings,
    started: DeploymentOptions,
    modes: Sequence[str],
    model: str | None,
) -> None:
    """Raises `ConfigError`, also for what would be ignored."""
    deploys = servers.candidate is None and not {"push", "pull"}.isdisjoint(modes)
    starts = servers.reference is None or servers.candidate is None
    of_deployment = {f.name for f in dataclasses.fields(DeploymentOptions)}
    of_deployment = (of_deployment - {"batch_invariant"}) | {*_OF_DEPLOYMENT, "kv_stream"}
    of_engines = {*declared_settings(StepSettings), "batch_invariant"}
    for names, used, what in (
        (of_deployment, deploys, "a deployment that verify starts, in mode push or pull"),
        (of_engines, starts, "an engine that verify starts"),
        ({"token_range"}, model is None, "random prompts, without a model"),
        ({"concurrency"}, deploys or servers.reference or servers.candidate, "servers"),
    ):
        for name in sorted(names if not used else ()):
            given = context.get_parameter_source(name)
            if given is not None and given.name != "DEFAULT":
                raise ConfigError(name, f"is of {what}, got {context.params[name]!r}")
    config = EngineConfig(
        model=model or "",
        batch_invariant=started.batch_invariant,
        kv_transfer_config=KVTransferConfig(kv_transport=started.kv_transport),
        **{name: getattr(engine, name) for name in declared_settings(StepSettings)},
    ).check()
    if deploys:
        started.check(config)
    check_sizes(config, started.prefill + started.decode if deploys else 1)


def _reference_settings(engine: StepSettings, model: str | None, batch_invariant: bool) -> dict[str, Any]:
    """Settings of an engine with one rank and the default memory, without handoffs."""
    settings = {name: getattr(engine, name) for name in declared_settings(StepSettings)}
    for name in _OF_DEPLOYMENT:
        del settings[name]
    return {**settings, "model": model, "batch_invariant": batch_invariant}


def _converse(ask: Callable[[list[Case]], Answers], cases: list[Case], turns: int) -> tuple[list[Case], Answers]:
    every, answers = cases, ask(cases)
    latest = answers
    for _ in range(turns - 1):
        cases = next_turns(cases, latest.observed)
        latest = ask(cases)
        every, answers = every + cases, answers + latest
    return every, answers


def _without_drafter(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "speculative_config"}


def _print_reports(
    cases: Sequence[Case],
    expected: Answers,
    modes: Sequence[str],
    ask: Callable[[str], Answers],
    bounds: Bounds,
    json_output: bool,
) -> bool:
    reports = []
    for mode in modes:
        answers = ask(mode)
        report = compare_answers(
            mode, cases, expected.observed, answers.observed, bounds.logprob_tolerance, bounds.near_tie
        )
        report.check = bounds.check(expected, answers)
        reports.append(report)
    print(json.dumps([report_json(r) for r in reports], indent=1) if json_output else format_reports(reports))
    return all(report.passed for report in reports)


def _warn_of_bos(cases: Sequence[Case], answers: Answers, bos: int | None, texts: bool) -> None:
    """A prompt that begins with BOS twice gets equal but worse answers on both sides."""
    answered = zip(cases, answers.observed, strict=True)
    num = num_doubled([case.prompt_token_ids or seen.prompt_token_ids or () for case, seen in answered], bos)
    if num:
        cure = ": the tokenizer adds it to text that has it; see --no-add-special-tokens" if texts else ""
        _print_status(f"warning: {num} of {len(cases)} prompts begin with BOS (token {bos}) twice{cure}")


def _print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
