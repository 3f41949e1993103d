"""Configuration of one engine, with the names of vLLM's engine arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from baton.engine.attention.registry import backend_name
from baton.engine.config.settings import RANKS, ServingSettings
from baton.engine.config.values import block_sizes
from baton.engine.loading.generation_config import GENERATION_FIELDS, sampling_defaults
from baton.engine.loading.hub import checkpoint_directory
from baton.engine.loading.servable import check_servable
from baton.errors import ConfigError
from baton.handoff.session.keys import check_bind, ticket_key_file
from baton.sampling_params import SamplingDefaults
from baton.setting import check_settings
from baton.transports.registry import check_device, parse_uri, require_keys
from baton.wire import Role


@dataclass(frozen=True, slots=True)
class EngineConfig(ServingSettings):
    """`check()` raises `ConfigError` naming the first bad field.

    `model`: a checkpoint directory, or before `located()` ORG/NAME on the hub, at `revision`. `skip_tokenizer_init`:
    prompts are token ids; no output text. Data-parallel ranks meet in the directory `data_parallel_store`. `keys`: a
    key directory, which also holds the ticket key; without one the control socket stays on loopback.
    """

    model: str
    role: Role = "both"
    engine_id: str = "engine"
    skip_tokenizer_init: bool = False
    ticket_key_file: str | None = None
    keys: str | None = None
    data_parallel_rank: int = 0
    data_parallel_store: str | None = None

    def check(self) -> EngineConfig:
        check_settings(self)
        block_sizes(self.block_size)
        backend_name(self.attention_backend, self.device)
        for name in self.override_generation_config or {}:
            if name not in GENERATION_FIELDS:
                what = f"is unknown; known: {', '.join(GENERATION_FIELDS)}"
                raise ConfigError(f"override_generation_config.{name}", what)
        self._need(self.role in get_args(Role), "role", "both, prefill or decode")
        named = re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.engine_id) is not None
        self._need(named, "engine_id", "1-64 of A-Z a-z 0-9 _ . -")
        name = self.served_model_name or Path(self.model).name
        for field, text in (("served_model_name", name), ("model", self.model)):
            if not _is_utf8(text):
                raise ConfigError(field, "is not UTF-8 in this locale: set LC_ALL=C.UTF-8, or give another")
        if not name.isprintable():
            raise ConfigError("served_model_name", f"{name!r} is not printable: give another")
        self._check_ranks()
        spec = self.speculative_config
        if spec is not None and spec.num_speculative_tokens == 0 and self.role != "prefill":
            raise ConfigError("speculative_config.num_speculative_tokens", "may be 0 with role prefill alone")
        both = self.kv_cache_memory is not None and self.gpu_memory_utilization is not None
        self._need(not both, "gpu_memory_utilization", "left out with kv_cache_memory")
        prompts = self.max_prefill_tokens_with_decodes or 0
        bounded = prompts <= self.max_num_batched_tokens
        self._need(bounded, "max_prefill_tokens_with_decodes", "at most max_num_batched_tokens")
        self._need(self.role == "both" or not self.token_api, "token_api", f"left out with role {self.role}")
        self._need(self.quantization is None or self.device == "cpu", "quantization", "left out unless device is cpu")
        rows = 1 + self.num_drafts
        enough = self.max_num_batched_tokens >= rows
        self._need(enough, "max_num_batched_tokens", f"at least {rows} (one verification)")
        self._check_handoff()
        return self

    def _need(self, ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise ConfigError(name, f"must be {rule}, got {getattr(self, name)!r}")

    def _check_ranks(self) -> None:
        need, slices, size = self._need, self.reduction_slices, self.data_parallel_size
        fits = slices is None or (slices in RANKS and slices % self.tensor_parallel_size == 0)
        need(fits, "reduction_slices", "a power of two up to 8, and a multiple of tensor_parallel_size")
        need(slices is None or self.batch_invariant, "reduction_slices", "left out without batch_invariant")
        need(0 <= self.data_parallel_rank < size, "data_parallel_rank", f"0 to {size - 1}")
        need(size == 1 or self.num_ranks == 1, "data_parallel_size", "1 with other tensor ranks or stages than one")
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            need(getattr(self, name) == 1 or self.device == "cpu", name, "1 unless device is cpu")

    def _check_handoff(self) -> None:
        transfer = self.kv_transfer_config
        layers = self.kv_stream == "layer"
        self._need(not layers or self.device == "cpu", "kv_stream", "off or chunk unless device is cpu")
        if self.role != "both" and self.ticket_key_path is None:
            raise ConfigError("ticket_key_file", f"is required with role {self.role}, or a key directory with --keys")
        guarded = self.ticket_key_path is None or self.keys is not None
        require_keys(transfer.kv_transport, guarded, "kv_transfer_config.kv_transport")
        if self.ticket_key_path is not None:
            check_device(transfer.kv_transport, self.device, "kv_transfer_config.kv_transport")
        if self.ticket_key_path is not None and self.num_ranks > 1:
            shared = parse_uri(transfer.kv_transport)[0].rpartition("+")[2] == "shm"
            what = f"must be shm with several ranks, which share their pages, got {transfer.kv_transport!r}"
            if not shared:
                raise ConfigError("kv_transfer_config.kv_transport", what)
        stores = transfer.prefix_store is not None
        if stores and self.num_ranks > 1:
            raise ConfigError("kv_transfer_config.prefix_store", "is for engines of one rank")
        if stores and not self.enable_prefix_caching:
            raise ConfigError("kv_transfer_config.prefix_store", "needs prefix caching, which is off")
        publishes = self.kv_events_config.enabled
        self._need(not publishes or self.enable_prefix_caching, "kv_events_config", "off without prefix caching")
        check_bind(transfer.control_bind, self.keys is not None)

    def sampling_defaults(self) -> SamplingDefaults:
        """Raises `ConfigError` naming the field."""
        return sampling_defaults(self.model, self.generation_config, self.override_generation_config)

    def located(self) -> EngineConfig:
        """Replace names on the hub by local directories; the API keeps the names.

        Raises `ConfigError` for an unavailable model, `CheckpointError` for one that cannot be served.
        """
        model, spec = checkpoint_directory(self.model, self.revision), self.speculative_config
        check_servable(model)
        if spec is not None and spec.model is not None:
            head = checkpoint_directory(spec.model, spec.revision, "speculative_config.model")
            check_servable(head)
            spec = replace(spec, model=head, revision=None)
        name = self.served_model_name or (None if model == self.model else self.model)
        config = replace(self, model=model, revision=None, speculative_config=spec, served_model_name=name)
        config.sampling_defaults()
        return config

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_slices(self) -> int:
        return self.reduction_slices or self.tensor_parallel_size

    @property
    def num_drafts(self) -> int:
        return self.speculative_config.max_drafts if self.speculative_config else 0

    @property
    def num_lookahead_slots(self) -> int:
        """Token slots after a step's tokens that target and drafter write. A block of DFlash has a row for the token
        before its drafts, which may be the step's last.
        """
        spec = self.speculative_config
        return self.num_drafts + (spec is not None and spec.method == "dflash")

    @property
    def ticket_key_path(self) -> Path | None:
        if self.ticket_key_file is not None:
            return Path(self.ticket_key_file)
        return None if self.keys is None else ticket_key_file(self.keys)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
