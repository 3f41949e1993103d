"""Configuration of one engine. Field names follow vLLM's engine arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from baton.drafters.methods import DRAFTERS
from baton.engine.loading.generation_config import GENERATION_FIELDS, sampling_defaults
from baton.engine.loading.hub import checkpoint_directory
from baton.engine.loading.servable import check_servable
from baton.errors import ConfigError
from baton.handoff.session.config import DEFAULT_HANDOFF_TIMEOUT_S
from baton.handoff.session.keys import check_bind, ticket_key_file
from baton.kv.cache import CHECKPOINT_TOKENS
from baton.kv.interval import MAX_TOKENS
from baton.sampling_params import MAX_WORD, SamplingDefaults
from baton.transports.registry import check_device, check_keys, parse_uri
from baton.wire import Integrity, KVStream, Recovery, Role

Verifier = Literal["coupled", "rejection"]
DraftKV = Literal["require", "prefer", "drop"]
IntegritySetting = Literal["auto", Integrity]
INTEGRITY = ("auto", *get_args(Integrity))
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")

MAX_BLOCK_SIZE = 1024
RANKS = (1, 2, 4, 8)
MAX_DATA_RANKS = 64


# Methods without a drafter checkpoint: no weights, or the target's.
_WITHOUT_MODEL = ("ngram", "mtp")
# Fields that only one method takes, and passes to its drafter.
_OPTIONS = {"ngram": ("prompt_lookup_min", "prompt_lookup_max")}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`--speculative-config`: drafter method, checkpoint (with its `revision` on the hub), number k of drafts,
    verifier.

    `draft_kv`: the drafter's KV in a handoff. `require`: both engines must draft alike, as one engine would. `prefer`:
    move it if they do, else start cold. `drop`: never move it.
    `prompt_lookup_min`, `prompt_lookup_max`: lengths of the n-grams that `ngram` looks up.
    `draft_tensor_parallel_size`: 1 if given, since every tensor rank holds the whole drafter.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int = 3
    verifier: Verifier = "coupled"
    revision: str | None = None
    draft_kv: DraftKV = "require"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_tensor_parallel_size: int | None = None

    @classmethod
    def parse(cls, value: str | dict[str, Any] | None) -> SpeculativeConfig | None:
        """Raises `ConfigError` naming the key."""
        data = json_object("speculative_config", value)
        if data is None:
            return None
        _refuse_unknown("speculative_config", data, {f.name for f in fields(cls)})
        without = data.get("method") in _WITHOUT_MODEL
        if isinstance(data.get("method"), str) and data["method"] not in DRAFTERS:
            known = ", ".join(DRAFTERS)
            raise ConfigError("speculative_config.method", f"must be one of {known}, got {data['method']!r}")
        for key in ("method",) if without else ("method", "model"):
            if not isinstance(data.get(key), str) or not data[key]:
                raise ConfigError(f"speculative_config.{key}", "is required and must be a string")
        for key in ("model", "revision"):
            if without and data.get(key) is not None:
                raise ConfigError(f"speculative_config.{key}", f"is not for method {data['method']}")
        if not isinstance(data.get("revision"), str | None):
            raise ConfigError("speculative_config.revision", "must be a string")
        _check_int("num_speculative_tokens", data.get("num_speculative_tokens", 3), 0, 32)
        if data.get("draft_tensor_parallel_size") not in (None, 1):
            what = "must be 1: the drafter is whole on every tensor rank"
            raise ConfigError("speculative_config.draft_tensor_parallel_size", what)
        verifier, draft_kv = data.get("verifier", "coupled"), data.get("draft_kv", "require")
        if verifier not in get_args(Verifier):
            raise ConfigError("speculative_config.verifier", f"must be coupled or rejection, got {verifier!r}")
        if draft_kv not in get_args(DraftKV):
            raise ConfigError("speculative_config.draft_kv", f"must be require, prefer or drop, got {draft_kv!r}")
        for method, names in _OPTIONS.items():
            for name in names:
                if data.get(name) is None:
                    continue
                if data["method"] != method:
                    raise ConfigError(f"speculative_config.{name}", f"is for method {method}, not {data['method']}")
                _check_int(name, data[name], 1, 1 << 20)
        return cls(**data)

    @property
    def options(self) -> dict[str, int]:
        """The method's own fields that are given."""
        given = {name: getattr(self, name) for name in _OPTIONS.get(self.method, ())}
        return {name: value for name, value in given.items() if value is not None}


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"speculative_config.{name}", f"must be {least} to {most}, got {value!r}")


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """`--kv-transfer-config`: transport of the KV pool (a name or a URI) and bind address of the control socket.

    `handoff_timeout_s`: limit of a handoff's time, from when both engines have pages for it.
    `prefix_store` (`file:///DIRECTORY?max_bytes=N`): keeps the KV of prompts, for all engines of the model.
    """

    kv_transport: str = "shm"
    control_bind: str = "tcp://127.0.0.1:*"
    handoff_timeout_s: float = DEFAULT_HANDOFF_TIMEOUT_S
    prefix_store: str | None = None

    @classmethod
    def parse(cls, value: str | dict[str, Any] | None, kv_transport: str | None = None) -> KVTransferConfig:
        """`kv_transport` overrides the value in `value`. Raises `ConfigError` naming the key."""
        data = json_object("kv_transfer_config", value) or {}
        _refuse_unknown("kv_transfer_config", data, {f.name for f in fields(cls)})
        for key in ("kv_transport", "control_bind", "prefix_store"):
            if key in data and not isinstance(data[key], str):
                raise ConfigError(f"kv_transfer_config.{key}", "must be a string")
        timeout = data.get("handoff_timeout_s", DEFAULT_HANDOFF_TIMEOUT_S)
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout <= 3600:
            raise ConfigError("kv_transfer_config.handoff_timeout_s", f"must be in (0, 3600], got {timeout!r}")
        given = {} if kv_transport is None else {"kv_transport": kv_transport}
        return cls(**{**data, "handoff_timeout_s": float(timeout), **given})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an engine is started with. `check()` raises `ConfigError` naming the first bad field.

    `model`: a checkpoint directory, or before `located()` ORG/NAME on the hub, at `revision`.
    `skip_tokenizer_init`: prompts are token ids, and the output has no text.
    `kv_cache_memory`: bytes over all groups. None: `gpu_memory_utilization` of the free memory, on a host too, in equal
    parts for `engines_per_host` engines (`engine/memory/pool_size.py`).
    `max_model_len`: None takes the checkpoint's, or what fits into that memory.
    `mamba_block_size`: prefix hits of a model with states end at multiples of this number of tokens.
    `tensor_parallel_size` ranks share the target's heads and inner widths, `pipeline_parallel_size` stages of such
    ranks its layers. Each rank is a process.
    `reduction_slices`: with `batch_invariant`, engines with equal values compute the same bits with any number of
    ranks. None: `tensor_parallel_size`.
    `data_parallel_size` engines share the target's experts, if any. Each has its own requests and pages. This is number
    `data_parallel_rank`; they meet in the directory `data_parallel_store`.
    `keys`: a key directory, which holds the ticket key too. Without one the control socket stays on loopback.
    `generation_config`: source of sampling defaults: the checkpoint ("auto"), another directory, or none ("vllm").
    `override_generation_config` has priority (`engine/loading/generation_config.py`).
    `seed`: for requests without one. None draws one for each.
    `token_api`: an engine of role both also takes token ids from a router. The other roles always do.
    `stall_timeout_s`: seconds in one step after which an engine is taken to hang.
    `queue_timeout_s`: seconds after which a request that has not started ends with an error. 0: no limit.
    `max_queued_requests`: how many may wait for their first token. More are refused (HTTP 429).
    `recovery`: the last rung that a failed handoff may take.
    `integrity`: how many digests guard a handoff's bytes. `auto`: see `default_integrity`.
    `kv_stream`: send the bytes after the prefill (`off`), after each `chunk`, or also after layers of a chunk
    (`layer`).
    """

    model: str
    revision: str | None = None
    skip_tokenizer_init: bool = False
    role: Role = "both"
    served_model_name: str | None = None
    block_size: int | str = 16
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    dtype: str = "auto"
    device: str = "cpu"
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    engines_per_host: int = 1
    seed: int | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    enable_prefix_caching: bool = True
    mamba_block_size: int = CHECKPOINT_TOKENS
    batch_invariant: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_store: str | None = None
    reduction_slices: int | None = None
    attention_backend: str | None = None
    speculative_config: SpeculativeConfig | None = None
    kv_transfer_config: KVTransferConfig = field(default_factory=KVTransferConfig)
    ticket_key_file: str | None = None
    keys: str | None = None
    engine_id: str = "engine"
    recovery: Recovery = "full"
    integrity: IntegritySetting = "auto"
    kv_stream: KVStream = "chunk"
    queue_timeout_s: float = 0.0
    token_api: bool = False
    max_queued_requests: int = 1024
    stall_timeout_s: float = 120.0

    def check(self) -> EngineConfig:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(name, f"must be {rule}, got {getattr(self, name)!r}")

        need(self.role in get_args(Role), "role", "both, prefill or decode")
        block_sizes(self.block_size)
        need(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "at least 2")
        need(1 <= self.mamba_block_size <= MAX_TOKENS, "mamba_block_size", f"1 to {MAX_TOKENS}")
        need(1 <= self.max_num_seqs <= 4096, "max_num_seqs", "1 to 4096")
        need(self.max_queued_requests >= 1, "max_queued_requests", "at least 1")
        need(self.recovery in get_args(Recovery), "recovery", f"one of {', '.join(get_args(Recovery))}")
        need(self.integrity in INTEGRITY, "integrity", f"one of {', '.join(INTEGRITY)}")
        need(self.kv_stream in get_args(KVStream), "kv_stream", f"one of {', '.join(get_args(KVStream))}")
        need(self.kv_stream != "layer" or self.device == "cpu", "kv_stream", "off or chunk unless device is cpu")
        need(0 <= self.queue_timeout_s < 1e6, "queue_timeout_s", "seconds, or 0 for no limit")
        need(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
        need(re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None, "device", "cpu, cuda or cuda:N")
        need(self.kv_cache_memory is None or self.kv_cache_memory > 0, "kv_cache_memory", "positive bytes")
        utilization = self.gpu_memory_utilization
        need(utilization is None or 0.0 < utilization <= 1.0, "gpu_memory_utilization", "in (0, 1]")
        need(1 <= self.engines_per_host <= 1024, "engines_per_host", "1 to 1024")
        for name in self.override_generation_config or {}:
            if name not in GENERATION_FIELDS:
                what = f"is unknown; known: {', '.join(GENERATION_FIELDS)}"
                raise ConfigError(f"override_generation_config.{name}", what)
        need(self.seed is None or 0 <= self.seed <= MAX_WORD, "seed", "between 0 and 2**64 - 1")
        need(
            re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.engine_id) is not None, "engine_id", "1-64 of A-Z a-z 0-9 _ . -"
        )
        need(0 < self.stall_timeout_s <= 86400, "stall_timeout_s", "in (0, 86400]")
        need(self.tensor_parallel_size in RANKS, "tensor_parallel_size", f"one of {', '.join(map(str, RANKS))}")
        need(1 <= self.pipeline_parallel_size <= 8, "pipeline_parallel_size", "1 to 8")
        slices = self.reduction_slices
        fits = slices is None or (slices in RANKS and slices % self.tensor_parallel_size == 0)
        need(fits, "reduction_slices", "a power of two up to 8, and a multiple of tensor_parallel_size")
        need(slices is None or self.batch_invariant, "reduction_slices", "left out without batch_invariant")
        size = self.data_parallel_size
        need(1 <= size <= MAX_DATA_RANKS, "data_parallel_size", f"1 to {MAX_DATA_RANKS}")
        need(0 <= self.data_parallel_rank < size, "data_parallel_rank", f"0 to {size - 1}")
        need(size == 1 or self.num_ranks == 1, "data_parallel_size", "1 with other tensor ranks or stages than one")
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            need(getattr(self, name) == 1 or self.device == "cpu", name, "1 unless device is cpu")
        spec = self.speculative_config
        if spec is not None and spec.num_speculative_tokens == 0 and self.role != "prefill":
            raise ConfigError("speculative_config.num_speculative_tokens", "may be 0 with role prefill alone")
        rows = 1 + self.num_drafts
        need(self.max_num_batched_tokens >= rows, "max_num_batched_tokens", f"at least {rows} (one verification)")
        if self.role != "both" and self.ticket_key_path is None:
            raise ConfigError("ticket_key_file", f"is required with role {self.role}, or a key directory with --keys")
        # Only an engine that takes part in handoffs opens its transport.
        guarded = self.ticket_key_path is None or self.keys is not None
        check_keys(self.kv_transfer_config.kv_transport, guarded, "kv_transfer_config.kv_transport")
        if self.ticket_key_path is not None:
            check_device(self.kv_transfer_config.kv_transport, self.device, "kv_transfer_config.kv_transport")
        store = self.kv_transfer_config.prefix_store
        if store is not None and parse_uri(store)[0] != "file":
            raise ConfigError("kv_transfer_config.prefix_store", f"must be file:///DIRECTORY, got {store!r}")
        if store is not None and self.num_ranks > 1:
            raise ConfigError("kv_transfer_config.prefix_store", "is for engines of one rank")
        if store is not None and not self.enable_prefix_caching:
            raise ConfigError("kv_transfer_config.prefix_store", "needs prefix caching, which is off")
        check_bind(self.kv_transfer_config.control_bind, self.keys is not None)
        return self

    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling parameters of requests that do not set them. Raises `ConfigError` naming the field."""
        return sampling_defaults(self.model, self.generation_config, self.override_generation_config)

    def located(self) -> EngineConfig:
        """This configuration with local directories instead of names on the hub, which stay the names in the API.

        Raises `ConfigError` naming a model that cannot be had, `CheckpointError` for one that cannot be served.
        """
        model, spec = checkpoint_directory(self.model, self.revision), self.speculative_config
        check_servable(model)
        if spec is not None and spec.model is not None:
            head = checkpoint_directory(spec.model, spec.revision, "speculative_config.model")
            check_servable(head)
            spec = replace(spec, model=head, revision=None)
        name = self.served_model_name or (None if model == self.model else self.model)
        found = replace(self, model=model, revision=None, speculative_config=spec, served_model_name=name)
        found.sampling_defaults()
        return found

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_slices(self) -> int:
        """Slices that sums of row-parallel products are cut into."""
        return self.reduction_slices or self.tensor_parallel_size

    @property
    def num_drafts(self) -> int:
        """Draft tokens per verification; 0 without a drafter."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    @property
    def ticket_key_path(self) -> Path | None:
        """`ticket_key_file`, else the file in the key directory."""
        if self.ticket_key_file is not None:
            return Path(self.ticket_key_file)
        return None if self.keys is None else ticket_key_file(self.keys)


def block_sizes(value: int | str, field: str = "block_size") -> dict[str, int]:
    """Tokens per KV page from `16` or `16,draft=8,sliding_window=32`: by name, owner or kind of groups; the empty name
    is for all others. Raises `ConfigError` naming `field`."""
    sizes = {"": 16}
    for part in str(value).split(","):
        name, _, size = part.rpartition("=")
        if not size.strip().isdecimal() or not 1 <= int(size) <= MAX_BLOCK_SIZE:
            raise ConfigError(field, f"must be 1 to {MAX_BLOCK_SIZE}, got {value}")
        sizes[name.strip()] = int(size)
    return sizes


def parse_size(text: str, field: str = "kv_cache_memory") -> int:
    """Bytes from `2G`, `512M`, `1.5G` (powers of 1024), `2g` (powers of 1000) or a plain number, as in vLLM.

    Raises `ConfigError` naming `field`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)(?:i?B)?", text.strip())
    if found is None:
        raise ConfigError(field, f"must be bytes, or a size such as 512M or 2G, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]


def json_object(name: str, value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """Raises `ConfigError` naming the setting."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(name, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(name, "must be a JSON object")
    return value


def _refuse_unknown(name: str, data: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigError(f"{name}.{unknown[0]}", f"is unknown; known: {', '.join(sorted(known))}")
