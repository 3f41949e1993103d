"""vLLM's V2 model runner, the default on GPUs: its connector class drives two `BatonConnector`s over CPU tensors."""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import override_forward_context
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu import kv_connector as v2
from vllm.v1.worker.gpu import model_runner

from baton.handoff.channel.keys import make_keys, ticket_key_file
from baton.handoff.protocol.ticket import Ticket, load_or_create_key, mint
from baton.vllm import BatonConnector
from baton.vllm.scheduler import handoff_digest

PROMPT = list(range(100, 171))  # 70 of its 71 tokens are handed over: two whole blocks of 32, and a part of a third
LAYERS = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"]  # the last is the drafter's
ENDS = ("finished_sending", "finished_recving", "failed_recving")


def config(folder: Path, name: str, role: str) -> Any:
    """The part of vLLM's configuration that the connector reads, of a GPU's runner with an EAGLE-3 drafter."""
    sizes = ("tensor", "pipeline", "data", "prefill_context", "decode_context")

    def model(path: str, layers: int) -> Any:
        return SimpleNamespace(
            model=path,
            revision="main",
            dtype=torch.float32,
            quantization=None,
            use_mla=False,
            has_inner_state=False,
            enable_sleep_mode=False,
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(eos_token_id=2),
            get_total_num_hidden_layers=lambda: layers,
            get_total_num_kv_heads=lambda: 2,
            get_vocab_size=lambda: 1000,
            try_get_generation_config=dict,
        )

    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=name,
            kv_role=role,
            kv_connector_extra_config={"keys": str(folder / "keys"), "kv_transport": f"file://{folder}/kv"},
        ),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=1,
            data_parallel_index=0,
            data_parallel_external_lb=False,
            **{f"{size}_parallel_size": 1 for size in sizes},
        ),
        speculative_config=SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=3,
            use_multi_module_mtp=lambda: False,
            draft_model_config=model("drafter", 1),
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=model("target", 2),
        compilation_config=SimpleNamespace(
            is_custom_op_enabled=lambda name: True, static_forward_context={layer: object() for layer in LAYERS}
        ),
        use_v2_model_runner=True,
    )


class Engine:
    """The connector's two halves, and vLLM's class between them. `forward` and `propose` of a step write the KV."""

    def __init__(self, folder: Path, name: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
        vllm_config = config(folder, name, role)
        spec = kv.FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
        groups: Any = SimpleNamespace(kv_cache_groups=[kv.KVCacheGroupSpec(list(LAYERS), spec)])
        memory = torch.zeros(len(LAYERS), 8, 2, 32, 32)
        self.caches = {layer: memory[i] for i, layer in enumerate(LAYERS)}
        self.worker: Any = BatonConnector(vllm_config, KVConnectorRole.WORKER, groups)
        monkeypatch.setattr(v2, "get_kv_transfer_group", lambda: self.worker)
        self.runner = v2.ActiveKVConnector(vllm_config, self.caches)
        self.scheduler: Any = BatonConnector(vllm_config, KVConnectorRole.SCHEDULER, groups)
        pool = SimpleNamespace(blocks=[], touch=lambda blocks: None, free_blocks=lambda blocks: None)
        self.scheduler.bind_gpu_block_pool(pool)
        self.handshake = self.worker.get_handshake_metadata()
        self.scheduler.set_xfer_handshake_metadata({0: self.handshake})
        self.ends: list[tuple[str, str]] = []

    def step(
        self, write: Callable[[], None] | None = None, propose: Callable[[], None] | None = None, **more: Any
    ) -> None:
        """One step in the V2 runner's order; without `write` one that computes nothing."""
        step: Any = SimpleNamespace(
            has_sync_kv_loads=False,
            finished_req_ids=set(),
            preempted_req_ids=set(),
            num_scheduled_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
            ),
        )
        vars(step).update(more)
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        step.kv_connector_metadata = self.scheduler.build_connector_meta(step)
        context: Any = SimpleNamespace()
        with override_forward_context(context):
            if write is None:
                out = self.runner.no_forward(step).kv_connector_output
            else:
                batch: Any = SimpleNamespace(idx_mapping=None, req_ids=[], num_tokens=0)
                self.runner.pre_forward(step, batch)
                write()
                self.runner.finish_forward()
                (propose or write)()
                out = self.runner.post_forward(step.finished_req_ids)
        if isinstance(out, KVConnectorOutput):
            self.ends += [(end, request) for end in ENDS for request in sorted(getattr(out, end) or ())]
            self.scheduler.update_connector_output(out)

    def step_until(self, there: Callable[[], bool]) -> None:
        until = time.monotonic() + 30
        while not there():
            assert time.monotonic() < until, self.ends
            self.step()

    def tokens(self, layer: str, blocks: list[int], stop: int) -> torch.Tensor:
        """A request's entries `[heads, tokens, K and V]` in one layer."""
        return torch.cat([self.caches[layer][block] for block in blocks], dim=1)[:, :stop]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine]]:
    make_keys(tmp_path / "keys", ["P", "D"])
    made = (Engine(tmp_path, "P", "kv_producer", monkeypatch), Engine(tmp_path, "D", "kv_consumer", monkeypatch))
    yield made
    for engine in made:
        engine.worker.shutdown()


def legs(folder: Path, p: Engine, d: Engine) -> tuple[Any, Any]:
    """The two requests that a router sends."""
    now = time.monotonic() + 60
    parties = p.handshake.identity, d.handshake.identity
    ticket = Ticket.between(*parties, "push", handoff_digest(PROMPT[:-1]), (now, now))
    text = mint(load_or_create_key(ticket_key_file(folder / "keys")), ticket)
    plain = {"prompt_token_ids": PROMPT, "prompt_embeds": None, "lora_request": None, "mm_features": ()}

    def leg(role: str, max_tokens: int) -> Any:
        params = {"baton": {"role": role, "ticket": text}}
        return SimpleNamespace(
            request_id=role, max_tokens=max_tokens, output_token_ids=[5], kv_transfer_params=params, **plain
        )

    return leg("prefill", 1), leg("decode", 8)


P_BLOCKS, D_BLOCKS = [5, 2, 7], [1, 6, 3]


def begin(p: Engine, d: Engine, prefill: Any, decode: Any) -> None:
    """P computes the first 40 tokens, drafter and all; D gets blocks and waits for its KV."""
    p.scheduler.on_new_request(prefill)
    d.scheduler.on_new_request(decode)
    assert d.scheduler.get_num_new_matched_tokens(decode, 0) == (None, False)
    d.step()
    new = SimpleNamespace(req_id="prefill", num_computed_tokens=0, block_ids=(P_BLOCKS[:2],))
    compute(p, 0, 40, scheduled_new_reqs=[new])
    d.step_until(lambda: d.scheduler.get_num_new_matched_tokens(decode, 0) == (len(PROMPT) - 1, True))
    d.scheduler.update_state_after_alloc(decode, SimpleNamespace(get_block_ids=lambda: (D_BLOCKS,)), len(PROMPT) - 1)
    d.step()


def compute(p: Engine, start: int, stop: int, **step: Any) -> None:
    """One of P's steps: target layers in the forward pass, the drafter's after it."""

    def fill(layers: list[str]) -> None:
        for layer in layers:
            for token in range(start, stop):
                p.caches[layer][P_BLOCKS[token // 32], :, token % 32] = torch.randn(2, 32)

    p.step(lambda: fill(LAYERS[:2]), lambda: fill(LAYERS[2:]), num_scheduled_tokens={"prefill": stop - start}, **step)


def rest(p: Engine) -> None:
    cached = SimpleNamespace(
        req_ids=["prefill"], num_computed_tokens=[40], new_block_ids=[(P_BLOCKS[2:],)], resumed_req_ids=set()
    )
    compute(p, 40, len(PROMPT), scheduled_cached_reqs=cached)


def test_a_handoff_in_chunks_brings_what_forward_and_proposer_wrote(
    tmp_path: Path, engines: tuple[Engine, Engine]
) -> None:
    p, d = engines
    prefill, decode = legs(tmp_path, p, d)
    begin(p, d, prefill, decode)
    rest(p)
    assert p.scheduler.request_finished_all_groups(prefill, (P_BLOCKS,)) == (True, None)
    assert p.scheduler.has_pending_push_work()
    p.step()
    d.step_until(lambda: bool(d.ends))
    p.step_until(lambda: bool(p.ends))
    for engine in engines:
        engine.step()  # each end is told once
    assert (p.ends, d.ends) == ([("finished_sending", "prefill")], [("finished_recving", "decode")])
    n = len(PROMPT) - 1
    for layer in LAYERS:
        sent, received = p.tokens(layer, P_BLOCKS, n), d.tokens(layer, D_BLOCKS, n)
        assert sent.abs().amin() > 0
        assert torch.equal(sent, received), layer
        assert not d.tokens(layer, D_BLOCKS, 96)[:, n:].any()  # nothing behind the interval
        assert not d.caches[layer][[0, 2, 4, 5, 7]].any()  # nothing in others' blocks


def test_a_leg_that_is_preempted_before_its_end_fails(tmp_path: Path, engines: tuple[Engine, Engine]) -> None:
    """The V2 runner has zeroed the blocks when it says so."""
    p, d = engines
    prefill, decode = legs(tmp_path, p, d)
    begin(p, d, prefill, decode)
    rest(p)
    p.step(preempted_req_ids={"prefill"})
    d.step_until(lambda: len(d.ends) > 1)
    assert d.ends == [("finished_recving", "decode"), ("failed_recving", "decode")]
    assert p.scheduler.request_finished_all_groups(prefill, ([],)) == (False, None)
    p.step()
    assert p.ends == []


def test_a_client_that_leaves_gives_both_sides_blocks_back_once(tmp_path: Path, engines: tuple[Engine, Engine]) -> None:
    p, d = engines
    prefill, decode = legs(tmp_path, p, d)
    begin(p, d, prefill, decode)
    for engine, request, blocks in ((p, prefill, P_BLOCKS[:2]), (d, decode, D_BLOCKS)):
        engine.scheduler.request_finished_all_groups(request, (blocks,))
        engine.step()
    d.step_until(lambda: ("finished_recving", "decode") in d.ends)
    p.step_until(lambda: bool(p.ends))
    for engine in engines:
        engine.step()
    assert p.ends == [("finished_sending", "prefill")]
    assert d.ends.count(("finished_recving", "decode")) == 1


def calls(tree: ast.AST, method: str) -> list[int]:
    """Lines of the calls of `method`."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sorted(node.lineno for node in found if ast.unparse(node.func) == method)


def test_vllm_still_ends_a_step_behind_the_proposer() -> None:
    """The connector declares tokens final in `post_forward`, the drafter's too: they must have been written."""
    runner = model_runner.GPUModelRunner
    execute, sample = (
        ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
        for method in (runner.execute_model, runner.sample_tokens)
    )
    end = "self.kv_connector.post_forward"
    assert not calls(execute, end)
    (proposed,) = calls(sample, "self.speculator.propose")
    # Stages that do not draft end their step in a branch of its own, right after the forward pass.
    (stage,) = (
        node
        for node in ast.walk(sample)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "not self.is_last_pp_rank" and calls(node, end)
    )
    assert isinstance(stage.body[-1], ast.Return)
    early, last = calls(sample, end)
    assert calls(stage, end) == [early]
    assert early < proposed < last
