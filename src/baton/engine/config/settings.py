"""The settings of an engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from baton.engine.config.kv_transfer import KVTransferConfig
from baton.engine.config.speculative import SpeculativeConfig
from baton.engine.config.values import parse_size
from baton.kv.cache import CHECKPOINT_TOKENS
from baton.kv.interval import MAX_TOKENS
from baton.kvevents.config import KVEventsConfig
from baton.sampling_params import MAX_WORD
from baton.setting import MAX_SECONDS, Rule, Setting, at_least, in_range, json_object, matching, one_of
from baton.wire import Integrity, KVStream, Recovery

IntegritySetting = Literal["auto", "off", "sampled", "full"]
INTEGRITY = get_args(IntegritySetting)
assert ("auto", *get_args(Integrity)) == INTEGRITY
DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")
QUANTIZATIONS = ("int8",)
RANKS = (1, 2, 4, 8)
MAX_DATA_RANKS = 64
MAX_ENGINES = 1024
# Annotations are evaluated outside this module, so their lambdas cannot name its constants.
_SEEDS = Rule("between 0 and 2**64 - 1", lambda value: 0 <= value <= MAX_WORD)
_NAMED = Rule("a name", bool)
_SECONDS_OR_NO_LIMIT = Rule("seconds, or 0 for no limit", lambda value: 0 <= value <= MAX_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of all commands that start engines.

    `kv_cache_memory` None: see `engine/memory/pool_size.py`. With `batch_invariant`, engines of equal
    `reduction_slices` (None: `tensor_parallel_size`) compute the same bits with any number of ranks. `integrity` auto:
    see `default_integrity`.
    """

    speculative_config: Annotated[
        SpeculativeConfig | None,
        Setting(
            'JSON: {"method", "model", "num_speculative_tokens", "verifier", "draft_kv"}.',
            short="-sc",
            parse=SpeculativeConfig.parse,
            metavar="<str>",
        ),
    ] = None
    block_size: Annotated[
        int | str, Setting("Tokens per KV page; of groups that differ: 16,draft=8,mla=32.", parse=str, metavar="<str>")
    ] = 16
    max_num_batched_tokens: Annotated[int, Setting("Token budget of one step.", rule=in_range(1, MAX_TOKENS))] = 2048
    max_prefill_tokens_with_decodes: Annotated[
        int | None,
        Setting(
            "Most prompt tokens in a step that decodes too; default: the budget.",
            rule=at_least(1),
        ),
    ] = None
    max_decode_gap_s: Annotated[
        float,
        Setting(
            "Longest pause of streams while prompts are computed, by measured times; 0: no limit.",
            rule=_SECONDS_OR_NO_LIMIT,
        ),
    ] = 0.2
    max_num_seqs: Annotated[int, Setting("Most sequences in one step.", rule=in_range(1, 4096))] = 64
    dtype: Annotated[str, Setting("auto, float32, bfloat16, or float16: computed in float32.", rule=one_of(DTYPES))] = (
        "auto"
    )
    quantization: Annotated[
        str | None, Setting("int8: linear layers' weights in 8 bits, on CPUs.", short="-q", rule=one_of(QUANTIZATIONS))
    ] = None
    device: Annotated[
        str, Setting("cpu, cuda or cuda:N.", rule=matching(r"cpu|cuda(:[0-9]+)?", "cpu, cuda or cuda:N"))
    ] = "cpu"
    kv_cache_memory: Annotated[
        int | None,
        Setting(
            "KV cache: bytes, 512M, 2G; default: a share.",
            rule=Rule("positive bytes", lambda value: value > 0),
            parse=parse_size,
            metavar="SIZE",
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int, Setting("Ranks that share the model, a process each.", short="-tp", rule=one_of(RANKS))
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Setting("Stages that share the layers; their ranks multiply.", short="-pp", rule=in_range(1, 8))
    ] = 1
    data_parallel_size: Annotated[
        int,
        Setting(
            "Engines that split requests and share experts, each with a port of its own.",
            short="-dp",
            rule=in_range(1, MAX_DATA_RANKS),
        ),
    ] = 1
    reduction_slices: Annotated[
        int | None, Setting("With --batch-invariant: engines with the same number compute the same; default: ranks.")
    ] = None
    integrity: Annotated[IntegritySetting, Setting("Digests of bytes: auto, off, sampled or full.")] = "auto"
    kv_stream: Annotated[KVStream, Setting("Push after the prefill, by chunk of it, or by layer.")] = "chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings(StepSettings):
    """`max_model_len` None: the checkpoint's, or what fits into the memory. Prefix hits of a model with states end at
    multiples of `mamba_block_size` tokens, or where a request's known tokens end. `override_generation_config` has
    priority (`engine/loading/generation_config.py`).
    """

    revision: Annotated[str | None, Setting("Branch, tag or commit of the model on the hub.")] = None
    served_model_name: Annotated[str | None, Setting("Name in the API; default: the directory's.", rule=_NAMED)] = None
    kv_transfer_config: Annotated[
        KVTransferConfig,
        Setting(
            'JSON: {"kv_transport", "control_bind", "handoff_timeout_s", "prefix_store"}.',
            parse=KVTransferConfig.parse,
            metavar="<str>",
        ),
    ] = field(default_factory=KVTransferConfig)
    kv_events_config: Annotated[
        KVEventsConfig,
        Setting(
            'Publish KV events: {"enable_kv_cache_events": true, ...}.', parse=KVEventsConfig.parse, metavar="<str>"
        ),
    ] = field(default_factory=KVEventsConfig)
    max_model_len: Annotated[int | None, Setting("Longest sequence; default: the model's.", rule=at_least(2))] = None
    attention_backend: Annotated[str | None, Setting("Default: the best for the device.")] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Setting(
            "Part of free memory, a host's too, for weights and KV; default 0.6, CUDA 0.9.",
            rule=Rule("in (0, 1]", lambda value: 0.0 < value <= 1.0),
        ),
    ] = None
    engines_per_host: Annotated[
        int | None,
        Setting(
            "Engines that share this part equally; default: 1, or as many as up starts.",
            rule=in_range(1, MAX_ENGINES),
        ),
    ] = None
    seed: Annotated[
        int | None,
        Setting(
            "Seed of requests without one; default: a new one each.",
            rule=_SEEDS,
        ),
    ] = None
    generation_config: Annotated[
        str, Setting("Sampling defaults: the checkpoint's, none, or a directory's.", metavar="auto|vllm|DIR")
    ] = "auto"
    override_generation_config: Annotated[
        Mapping[str, Any] | None,
        Setting(
            'Sampling defaults that override those: {"temperature": 0.6}.',
            parse=functools.partial(json_object, "override_generation_config"),
            metavar="JSON",
        ),
    ] = None
    max_queued_requests: Annotated[
        int, Setting("Requests that may wait for a token; more get 429.", rule=at_least(1))
    ] = 1024
    enable_prefix_caching: Annotated[bool, Setting("Reuse KV of equal prefixes.")] = True
    mamba_block_size: Annotated[
        int, Setting("Tokens between kept states of a prompt.", rule=in_range(1, MAX_TOKENS))
    ] = CHECKPOINT_TOKENS
    batch_invariant: Annotated[bool, Setting("Same bits in every batch, at a cost.")] = False
    queue_timeout_s: Annotated[
        float,
        Setting(
            "Longest wait of a request for its start; 0: no limit.",
            rule=_SECONDS_OR_NO_LIMIT,
        ),
    ] = 0.0
    recovery: Annotated[Recovery, Setting("How far a failed handoff may be recovered.")] = "full"
    token_api: Annotated[
        bool, Setting("Role both: take a router's requests in token ids too, on the clients' port.")
    ] = False
    stall_timeout_s: Annotated[
        float,
        Setting(
            "An engine whose step takes longer is given up.",
            rule=Rule("in (0, 86400]", lambda value: 0 < value <= 86400),
        ),
    ] = 120.0
