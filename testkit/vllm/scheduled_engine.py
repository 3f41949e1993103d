"""An engine of vLLM's own scheduler, KV-cache manager and connector classes that computes nothing: `BatonConnector`
moves entries between CPU tensors, into the blocks that vLLM chooses. It needs no compiled part of vLLM.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import override_forward_context
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as v1

from baton.handoff.protocol.ticket import Ticket, load_or_create_key, sign_ticket
from baton.handoff.session.keys import ticket_key_file
from baton.vllm import BatonConnector
from baton.vllm.scheduler import handoff_digest

MODELS = Path(__file__).parents[2] / "models"
EAGLE3 = {"method": "eagle3", "model": str(MODELS / "baton-demo-eagle3"), "num_speculative_tokens": 3}
DFLASH = {"method": "dflash", "model": str(MODELS / "baton-demo-dflash"), "num_speculative_tokens": 3}
DRAFT_ENTRY = -3.0
BLOCK, NUM_BLOCKS, BUDGET = 32, 32, 64


def scaled_layer(cache_dtype: str, *scales: float) -> SimpleNamespace:
    """The scales of vLLM's attention layer: one, or one of each head here."""
    tensor, number = torch.tensor(scales), max(scales)
    names = {f"_{name}_scale": tensor for name in "kv"} | {f"_{name}_scale_float": number for name in "kv"}
    return SimpleNamespace(kv_cache_dtype=cache_dtype, **names)


class ScheduledEngine:
    """One engine. `caches`: [blocks, heads, tokens, K then V] by layer, in float32, or with `scale` the bytes of FP8
    numbers that each layer scales so; layers after the second are those of the drafter `spec`, `EAGLE3` or `DFLASH`.
    With a `window` the second layer has it, and tokens are moved one by one, as on GPUs. `retention`: where windows
    stay in the prefix cache, by default everywhere; vLLM's own default is 0, only where prompts end."""

    def __init__(
        self,
        folder: Path,
        name: str,
        role: str,
        scale: float | None = None,
        window: int | None = None,
        spec: dict[str, Any] | None = EAGLE3,
        retention: int | None = None,
    ) -> None:
        extra = {"keys": str(folder / "keys"), "kv_transport": f"file://{folder}/kv", "kv_stream": "chunk"}
        extra["granularity"] = "page" if window is None else "token"
        transfer = KVTransferConfig(
            kv_connector="BatonConnector",
            kv_connector_module_path="baton.vllm",
            kv_role=role,  # type: ignore[arg-type]
            engine_id=name,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
        self.config = EngineArgs(
            str(MODELS / "baton-demo-llama"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_batched_tokens=BUDGET,
            block_size=BLOCK,
            speculative_config=spec,
            kv_transfer_config=transfer,
            kv_cache_dtype="auto" if scale is None else "fp8",
        ).create_engine_config()
        number = self.config.model_config.get_total_num_hidden_layers()
        num_drafters = 0 if spec is None else 2 if spec is DFLASH else 1
        numbers = (0, 1, *range(number, number + num_drafters))
        self.layers = [f"model.layers.{index}.self_attn.attn" for index in numbers]
        model = self.config.model_config
        heads, width = model.get_total_num_kv_heads(), model.get_head_size()
        dtype = torch.float32 if scale is None else torch.uint8  # as vLLM stores FP8
        shape: Any = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": width, "dtype": dtype}
        groups = [kv.KVCacheGroupSpec(self.layers, kv.FullAttentionSpec(**shape))]
        if window is not None:
            windows = kv.SlidingWindowSpec(**shape, sliding_window=window)
            groups = [kv.KVCacheGroupSpec([self.layers[0], *self.layers[2:]], groups[0].kv_cache_spec)]
            groups.append(kv.KVCacheGroupSpec([self.layers[1]], windows))
        self._group = {layer: at for at, group in enumerate(groups) for layer in group.layer_names}
        cache_config = kv.KVCacheConfig(NUM_BLOCKS, [], groups, prefix_cache_retention_interval=retention)
        self.config.cache_config.num_gpu_blocks = NUM_BLOCKS
        module = object() if scale is None else scaled_layer("fp8", scale)
        self.config.compilation_config.static_forward_context = dict.fromkeys(self.layers, module)
        self.caches = {layer: torch.zeros(NUM_BLOCKS, heads, BLOCK, 2 * width, dtype=dtype) for layer in self.layers}
        self.worker: Any = BatonConnector(self.config, KVConnectorRole.WORKER, cache_config)
        self.worker.register_kv_caches(self.caches)
        scheduler = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler: Any = scheduler(self.config, cache_config, StructuredOutputManager(self.config), BLOCK)
        self.connector = self.scheduler.get_kv_connector()
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        self.identity = self.connector.scheduler.identity
        self.blocks: dict[str, list[list[int]]] = {}  # by request and cache group
        self.first_tokens: dict[str, tuple[int, int]] = {}  # of a request's first step: computed before, scheduled
        self.num_drafts: list[int] = []  # that each step with tokens proposes
        self.tokens: dict[str, list[int]] = {}
        self.told: dict[str, Any] = {}  # the last `kv_transfer_params` of requests
        self.sleeps_after_kv = 0  # steps that delivered a request's KV, and after which vLLM's engine core sleeps

    def add(
        self, name: str, prompt: list[int], num: int, role: str | None = None, ticket: str = "", **leg: Any
    ) -> None:
        """A leg of a handoff. vLLM's other requests have no `role`. `leg`: more of `LegParams`."""
        params = SamplingParams(max_tokens=num, temperature=0, ignore_eos=True)
        if role is not None:
            params.extra_args = {"kv_transfer_params": {"baton": {"role": role, "ticket": ticket, **leg}}}
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=hasher))

    def step(self, entries: dict[str, dict[str, torch.Tensor]]) -> None:
        """One step in the V1 runner's order. Each forward writes `entries` [heads, tokens, elements] of the scheduled
        tokens, by request and layer, and samples token 5 once a request's tokens are all computed.
        """
        scheduled = self.scheduler.schedule()
        context: Any = SimpleNamespace()
        with override_forward_context(context):
            self._note(scheduled)
            mixin: Any = v1.KVConnectorModelRunnerMixin
            original = v1.get_kv_transfer_group
            v1.get_kv_transfer_group = lambda: self.worker
            try:
                with mixin._get_kv_connector_output(scheduled, defer_finalize=True) as output:
                    self._write(scheduled, entries, self.layers[:2])
                self._write(scheduled, entries, self.layers[2:])  # the drafter runs after the target
                self._write_drafts(scheduled)
                self.worker.wait_for_save()
                self.worker.clear_connector_metadata()
            finally:
                v1.get_kv_transfer_group = original
        requests = list(scheduled.num_scheduled_tokens)
        sampled = [[5] if self._ends(scheduled, name) else [] for name in requests]
        for name, tokens in zip(requests, sampled, strict=True):
            self.tokens.setdefault(name, []).extend(tokens)
        places = {name: index for index, name in enumerate(requests)}
        told = self.scheduler.update_from_output(
            scheduled, ModelRunnerOutput(requests, places, sampled, kv_connector_output=output)
        )
        if output.finished_recving and not scheduled.total_num_scheduled_tokens:
            self.sleeps_after_kv += 1
        self.told |= {one.request_id: one.kv_transfer_params for each in told.values() for one in each.outputs}
        if self.config.speculative_config is not None:
            drafted = [name for name, tokens in zip(requests, sampled, strict=True) if tokens]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, [[6, 7, 8] for _ in drafted]))

    def _note(self, scheduled: Any) -> None:
        if scheduled.total_num_scheduled_tokens:
            self.num_drafts.append(scheduled.num_spec_tokens_to_schedule)
        for new in scheduled.scheduled_new_reqs:
            self.blocks[new.req_id] = [list(table) for table in new.block_ids]
            count = scheduled.num_scheduled_tokens[new.req_id]
            self.first_tokens[new.req_id] = (new.num_computed_tokens, count)
        cached = scheduled.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.blocks[name] = [[] for _ in self.blocks[name]]
            for table, blocks in zip(self.blocks[name], more or (), strict=False):
                table += blocks

    def _range(self, scheduled: Any, name: str) -> range:
        """The positions of the tokens that a step computes for a request."""
        found = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        found |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return range(found[name], found[name] + scheduled.num_scheduled_tokens[name])

    def _ends(self, scheduled: Any, name: str) -> bool:
        return self._range(scheduled, name).stop >= self.scheduler.requests[name].num_tokens

    def _write(self, scheduled: Any, entries: dict[str, dict[str, torch.Tensor]], layers: list[str]) -> None:
        for name in scheduled.num_scheduled_tokens:
            for layer in layers:
                found = entries[name][layer]
                for token in self._range(scheduled, name):
                    block, at = divmod(token, BLOCK)
                    self.caches[layer][self.blocks[name][self._group[layer]][block], :, at] = found[:, token]

    def _write_drafts(self, scheduled: Any) -> None:
        """DFlash writes entries of the last known token and of the drafts into lookahead slots. The next step writes
        them again."""
        if self.config.speculative_config is None or self.config.speculative_config.method != "dflash":
            return
        for name in scheduled.num_scheduled_tokens:
            known = self._range(scheduled, name).stop - len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            for token in range(known, known + 1 + scheduled.num_spec_tokens_to_schedule):
                block, at = divmod(token, BLOCK)
                for layer in self.layers[2:]:
                    self.caches[layer][self.blocks[name][self._group[layer]][block], :, at] = DRAFT_ENTRY

    def step_until(self, entries: Any, other: ScheduledEngine, name: str, num: int) -> None:
        """Run steps of this engine and of its peer until a request has `num` tokens."""
        until = time.monotonic() + 120
        while len(self.tokens.get(name, [])) < num:
            assert time.monotonic() < until, (self.tokens, other.tokens)
            for engine in (other, self):
                engine.step(entries)

    def read(self, name: str, layer: str, num_tokens: int) -> torch.Tensor:
        """A request's first entries of a layer: [heads, tokens, elements]."""
        pages = self.caches[layer][self.blocks[name][self._group[layer]]]
        return pages.transpose(0, 1).flatten(1, 2)[:, :num_tokens]


def ticket(folder: Path, p: ScheduledEngine, d: ScheduledEngine, prompt: list[int], mode: Any) -> str:
    """As the router signs it."""
    now = time.monotonic() + 60
    found = Ticket.between(p.identity, d.identity, mode, handoff_digest(prompt[:-1]), (now, now))
    return sign_ticket(load_or_create_key(ticket_key_file(folder / "keys")), found)
