"""An engine of one or several tensor ranks that computes nothing: `BatonConnector` as vLLM's V2 model runner drives it,
over CPU tensors of vLLM's shapes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import override_forward_context
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu import kv_connector as v2

from baton.handoff.protocol.ticket import Ticket, load_or_create_key, sign_ticket
from baton.handoff.session.keys import ticket_key_file
from baton.vllm import BatonConnector, compat
from baton.vllm.scheduler import handoff_digest

PROMPT = list(range(100, 171))  # 70 of its 71 tokens are handed over: two whole blocks of 32 and a part
LAYERS = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"]  # the last is the drafter's
ENDS = ("finished_sending", "finished_recving", "failed_recving")
NUM_BLOCKS = 8


@dataclass(frozen=True)
class Model:
    """A token's entries in the layers: K and V of each head, in rows of `width` elements. `heads` are those of target
    and drafter; 0 is a latent, which every rank has.
    """

    heads: tuple[int, int]
    width: int = 32
    block_size: int = 32

    def num_heads(self, layer: str) -> int:
        return self.heads[layer == LAYERS[-1]]

    def rows(self, layer: str, rank: int, size: int) -> list[int]:
        """The model's numbers of the heads in `layer` that a rank of `size` has."""
        if not (total := self.num_heads(layer)):
            return [0]
        share, first = max(total // size, 1), rank * min(total, size) // size
        return list(range(first * share, (first + 1) * share))

    def spec(self, layer: str, size: int) -> Any:
        """The layer's cache on a rank of `size`, as vLLM specifies it."""
        num, dtype = len(self.rows(layer, 0, size)), torch.float32
        if self.num_heads(layer):
            return kv.FullAttentionSpec(
                block_size=self.block_size, num_kv_heads=num, head_size=self.width // 2, dtype=dtype
            )
        return kv.MLAAttentionSpec(block_size=self.block_size, num_kv_heads=num, head_size=self.width, dtype=dtype)

    def entries(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Random entries `[heads, tokens, elements]` of each layer, none of them 0."""
        return {layer: torch.rand(self.num_heads(layer) or 1, num_tokens, self.width) + 1 for layer in LAYERS}


def config(folder: Path, name: str, role: str, model: Model, rank: int, size: int) -> Any:
    """The part of vLLM's configuration that the connector reads, for a GPU runner with an EAGLE-3 drafter."""
    sizes = ("pipeline", "data", "prefill_context", "decode_context")

    def checkpoint(path: str, layers: int, heads: int) -> Any:
        return SimpleNamespace(
            model=path,
            revision="main",
            dtype=torch.float32,
            quantization=None,
            use_mla=False,
            has_inner_state=False,
            enable_sleep_mode=False,
            tokenizer=path,
            tokenizer_revision=None,
            max_model_len=1000,
            hf_config=SimpleNamespace(to_dict=dict),
            hf_text_config=SimpleNamespace(eos_token_id=2),
            get_total_num_hidden_layers=lambda: layers,
            get_total_num_kv_heads=lambda: heads,
            get_vocab_size=lambda: 1000,
            try_get_generation_config=dict,
            get_diff_sampling_param=dict,
            generation_config="auto",
            override_generation_config={},
            hf_overrides={},
            hf_config_path=None,
        )

    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=name,
            kv_role=role,
            kv_connector_extra_config={"keys": str(folder / "keys"), "kv_transport": f"file://{folder}/kv"},
        ),
        parallel_config=SimpleNamespace(
            rank=rank,
            world_size=size,
            tensor_parallel_size=size,
            data_parallel_index=0,
            data_parallel_external_lb=False,
            **{f"{kind}_parallel_size": 1 for kind in sizes},
        ),
        speculative_config=SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=3,
            use_multi_module_mtp=lambda: False,
            draft_model_config=checkpoint("drafter", 1, model.heads[1]),
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        structured_outputs_config=SimpleNamespace(backend="auto"),
        model_config=checkpoint("target", 2, model.heads[0]),
        compilation_config=SimpleNamespace(
            is_custom_op_enabled=lambda name: True, static_forward_context={layer: object() for layer in LAYERS}
        ),
        use_v2_model_runner=True,
    )


class Worker:
    """One rank: its KV, the worker's half of the connector, and vLLM's class that calls it."""

    def __init__(self, vllm_config: Any, groups: Any, model: Model) -> None:
        parallel = vllm_config.parallel_config
        self.rows = {layer: model.rows(layer, parallel.rank, parallel.world_size) for layer in LAYERS}
        self.caches = {
            layer: torch.zeros(NUM_BLOCKS, len(rows), model.block_size, model.width)
            for layer, rows in self.rows.items()
        }
        self.config = vllm_config
        self.connector: Any = BatonConnector(vllm_config, KVConnectorRole.WORKER, groups)
        self.runner: Any = None

    def compute(self, step: Any, write: Callable[[], None] | None, propose: Callable[[], None] | None) -> Any:
        """One step in the V2 runner's order. Returns its output for the scheduler."""
        context: Any = SimpleNamespace()
        with override_forward_context(context):
            if write is None:
                return self.runner.no_forward(step).kv_connector_output
            self.runner.pre_forward(step, SimpleNamespace(idx_mapping=None, req_ids=[], num_tokens=0))
            write()
            self.runner.finish_forward()
            if not hasattr(self.runner, "finalize_step"):  # vLLM 0.32
                (propose or write)()
                return self.runner.post_forward(step.finished_req_ids)
            output = self.runner.post_forward(step.finished_req_ids, defer_finalize=True)
            (propose or write)()
            self.runner.finalize_step()
            return output


class Engine:
    """The connector's halves, and vLLM's class between them. The workers run a step one after the other: each ends it
    before the next one begins.
    """

    def __init__(
        self, folder: Path, name: str, role: str, model: Model, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.model, self.ends = model, list[tuple[str, str]]()
        specs = {layer: model.spec(layer, size) for layer in LAYERS}
        together = kv.UniformTypeKVCacheSpecs(block_size=model.block_size, kv_cache_specs=specs)
        groups: Any = SimpleNamespace(kv_cache_groups=[kv.KVCacheGroupSpec(list(LAYERS), together)])
        configs = [config(folder, name, role, model, rank, size) for rank in range(size)]
        self.workers = [Worker(each, groups, model) for each in configs]
        self._start(monkeypatch)
        self.scheduler: Any = BatonConnector(configs[0], KVConnectorRole.SCHEDULER, groups)
        pool = SimpleNamespace(
            blocks=[],
            touch=lambda blocks: None,
            free_blocks=lambda blocks: None,
            # Too few blocks for legs that P has not admitted.
            num_gpu_blocks=1,
            get_num_free_blocks=lambda: 0,
        )
        self.scheduler.bind_gpu_block_pool(pool)
        handshakes = {(0, rank): worker.connector.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(handshakes)
        self.identity = self.scheduler.scheduler.identity
        self._joined = KVOutputAggregator.from_connector(self.scheduler, size)

    def _start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Register the caches of all workers at once, each in a thread: they exchange their layouts."""
        here, size = threading.local(), len(self.workers)
        told, all_told = dict[int, bytes](), threading.Barrier(size)

        def gather(vllm_config: Any, own: bytes) -> list[bytes]:
            told[vllm_config.parallel_config.rank] = own
            all_told.wait(120)
            found = [told[rank] for rank in range(size)]
            all_told.wait(120)  # nobody tells the next before all have read
            return found

        def start(worker: Worker) -> None:
            here.connector = worker.connector
            worker.runner = v2.ActiveKVConnector(worker.config, worker.caches)

        monkeypatch.setattr(compat, "gather_workers", gather)
        monkeypatch.setattr(v2, "get_kv_transfer_group", lambda: here.connector)
        with ThreadPoolExecutor(size) as threads:
            list(threads.map(start, self.workers))

    def step(
        self,
        write: Callable[[Worker], None] | None = None,
        propose: Callable[[Worker], None] | None = None,
        **more: Any,
    ) -> None:
        """One step of all workers; without `write` one that computes nothing."""
        step: Any = SimpleNamespace(
            has_sync_kv_loads=False,
            finished_req_ids=set(),
            preempted_req_ids=set(),
            num_scheduled_tokens={},
            scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
            ),
        )
        vars(step).update(more)
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        step.kv_connector_metadata = self.scheduler.build_connector_meta(step)
        outputs: list[Any] = []
        for worker in self.workers:
            calls = [None if call is None else partial(call, worker) for call in (write, propose)]
            outputs.append(SimpleNamespace(kv_connector_output=worker.compute(step, *calls)))
        joined = self._joined.aggregate(outputs)
        assert joined is not None
        out = joined.kv_connector_output
        assert isinstance(out, KVConnectorOutput)
        self.ends += [(end, request) for end in ENDS for request in sorted(getattr(out, end) or ())]
        self.scheduler.update_connector_output(out)

    def step_until(self, there: Callable[[], bool]) -> None:
        """Run steps that compute nothing, until `there`."""
        until = time.monotonic() + 120
        while not there():
            assert time.monotonic() < until, self.ends
            self.step()

    def compute(
        self, request: str, blocks: Sequence[int], entries: Mapping[str, torch.Tensor], new: range, **step: Any
    ) -> None:
        """A step that writes the `new` ones of a request's `entries` into its blocks: target layers in the forward, the
        drafter's after it.
        """

        def fill(layers: Sequence[str], worker: Worker) -> None:
            for layer in layers:
                found = entries[layer][worker.rows[layer]]
                for token in new:
                    block, at = divmod(token, self.model.block_size)
                    worker.caches[layer][blocks[block], :, at] = found[:, token]

        step["num_scheduled_tokens"] = {request: len(new)}
        self.step(partial(fill, LAYERS[:2]), partial(fill, LAYERS[2:]), **step)

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()


def legs(folder: Path, p: Engine, d: Engine) -> tuple[Any, Any]:
    """The two requests that a router sends."""
    now = time.monotonic() + 60
    ticket = Ticket.between(p.identity, d.identity, "push", handoff_digest(PROMPT[:-1]), (now, now))
    text = sign_ticket(load_or_create_key(ticket_key_file(folder / "keys")), ticket)
    plain = {"prompt_token_ids": PROMPT, "prompt_embeds": None, "lora_request": None, "mm_features": ()}

    def leg(role: str, max_tokens: int) -> Any:
        params = {"baton": {"role": role, "ticket": text}}
        return SimpleNamespace(
            request_id=role, max_tokens=max_tokens, output_token_ids=[5], kv_transfer_params=params, **plain
        )

    return leg("prefill", 1), leg("decode", 8)
