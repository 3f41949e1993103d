"""The settings of a router that users give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from baton.handoff.protocol.ticket import MAX_TICKET_LIFE_S, TICKET_LIFE_S
from baton.openai.http.waiting import MAX_QUEUED_REQUESTS
from baton.router.config.policy_config import DEFAULT_POLICY, PolicyConfig, read_config
from baton.setting import Setting, at_least, in_range
from baton.wire import Mode, Recovery

EngineKind = Literal["baton", "vllm", "sglang"]
MAX_WORKERS = 64
MAX_NEAR_TIE = 100.0
# Prefilling this many rows delays concurrent decodes less than a handoff would (docs/performance.md).
MAX_LOCAL_PREFILL_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    """Settings of all commands that start a router.

    `kv_mode` None: push, or the connector's only mode. `max_local_prefill_length` 0: decode engines compute no prompt
    while there is a prefill engine. `otlp_traces_endpoint`, `trace_sampling_ratio` None: OpenTelemetry's variables, if
    set.
    """

    kv_mode: Annotated[Mode | None, Setting("Who issues the copies: prefill (push, default) or decode (pull).")] = None
    policy: Annotated[
        str,
        Setting("How engines are chosen: cache_aware, least_loaded, power_of_two, round_robin, consistent_hash."),
    ] = DEFAULT_POLICY
    prefill_policy: Annotated[str | None, Setting("The same for prefill engines. Default: --policy.")] = None
    decode_policy: Annotated[str | None, Setting("The same for decode engines. Default: --policy.")] = None
    policy_config: Annotated[
        PolicyConfig,
        Setting("Weights and limits of the choice: docs/router.md.", parse=read_config, metavar="JSON"),
    ] = field(default_factory=PolicyConfig)
    max_local_prefill_length: Annotated[
        int,
        Setting(
            "Tokens of a prompt that a decode engine may lack to compute it itself; 0: hand off all.", rule=at_least(0)
        ),
    ] = MAX_LOCAL_PREFILL_LENGTH
    allow_mode_override: Annotated[bool, Setting("Let a request choose by its field kv_mode.")] = False
    otlp_traces_endpoint: Annotated[
        str | None, Setting("Send spans there over OTLP/HTTP: http://HOST:4318/v1/traces.", metavar="URL")
    ] = None
    trace: Annotated[str | None, Setting("Write spans as a timeline for ui.perfetto.dev.", metavar="FILE")] = None
    trace_sampling_ratio: Annotated[
        float | None,
        Setting("Share of requests without a traceparent that are traced. Default: all.", rule=in_range(0.0, 1.0)),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(RoutingSettings):
    """Settings of a router over running engines.

    `kv_connector`, `seed_first_token` and `near_tie`: only for `engine` vllm. `max_queued_requests`: in each process.
    """

    tokenizer: Annotated[str | None, Setting("Default: the engines' own checkpoint.")] = None
    recovery: Annotated[Recovery, Setting("How far the router goes for a request whose engines failed.")] = "full"
    engine: Annotated[EngineKind, Setting("What runs at the URLs: `baton serve`, vLLM, or SGLang.")] = "baton"
    kv_connector: Annotated[
        str | None, Setting("vLLM: BatonConnector (default), or its own NixlConnector (pull) or NixlPushConnector.")
    ] = None
    seed_first_token: Annotated[bool, Setting("vLLM: the decode server is sent the first token, and samples none.")] = (
        False
    )
    near_tie: Annotated[
        float | None,
        Setting(
            "vLLM: nats by which two first tokens may be apart. Default: 0.1; 0 excuses none.",
            rule=in_range(0.0, MAX_NEAR_TIE),
        ),
    ] = None
    ticket_life: Annotated[
        float,
        Setting("Seconds within which both legs must reach their engines.", rule=in_range(1, MAX_TICKET_LIFE_S)),
    ] = TICKET_LIFE_S
    max_queued_requests: Annotated[
        int, Setting("Choices that may wait for their first token; more get 429.", rule=at_least(1))
    ] = MAX_QUEUED_REQUESTS
    workers: Annotated[int, Setting("Processes that share the port.", rule=in_range(1, MAX_WORKERS))] = 1
