"""vLLM's V2 model runner, the default on GPUs: its connector class drives two `BatonConnector`s over CPU tensors."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu import model_runner

from baton.handoff.session.keys import make_keys
from testkit.vllm.v2_engine import LAYERS, PROMPT, Engine, Model, legs

P_BLOCKS, D_BLOCKS = [5, 2, 7], [1, 6, 3]
NUM = len(PROMPT) - 1  # tokens that are handed over
# Tensor ranks of P and of D; the drafter has one head, which both of two ranks hold.
RANKS = [(1, 1), (2, 1), (1, 2), (2, 2)]
MODELS = {
    "heads": Model(heads=(2, 1)),
    "latents, drafter of heads": Model(heads=(0, 2)),
    "latents": Model(heads=(0, 0)),
}
Engines = tuple[Engine, Engine]


@pytest.fixture(params=[(*ranks, kind) for kind in MODELS for ranks in (RANKS if kind == "heads" else RANKS[1:])])
def engines(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    make_keys(tmp_path / "keys", ["P", "D"])
    *sizes, kind = request.param
    roles = (("P", "kv_producer"), ("D", "kv_consumer"))
    found = [Engine(tmp_path, *role, MODELS[kind], size, monkeypatch) for role, size in zip(roles, sizes, strict=True)]
    p, d = found
    yield p, d
    for engine in found:
        engine.close()


def begin(p: Engine, d: Engine, prefill: Any, decode: Any, entries: dict[str, torch.Tensor]) -> None:
    """P computes the first 40 tokens, including the drafter; D gets blocks and waits for its KV."""
    p.scheduler.on_new_request(prefill)
    d.scheduler.on_new_request(decode)
    assert d.scheduler.get_num_new_matched_tokens(decode, 0) == (None, False)
    d.step()
    new = SimpleNamespace(req_id="prefill", num_computed_tokens=0, block_ids=(P_BLOCKS[:2],))
    p.compute("prefill", P_BLOCKS, entries, range(40), scheduled_new_reqs=[new])
    d.step_until(lambda: d.scheduler.get_num_new_matched_tokens(decode, 0) == (NUM, True))
    d.scheduler.update_state_after_alloc(decode, SimpleNamespace(get_block_ids=lambda: (D_BLOCKS,)), NUM)
    d.step()


def rest(p: Engine, entries: dict[str, torch.Tensor]) -> None:
    cached = SimpleNamespace(
        req_ids=["prefill"], num_computed_tokens=[40], new_block_ids=[(P_BLOCKS[2:],)], resumed_req_ids=set()
    )
    p.compute("prefill", P_BLOCKS, entries, range(40, len(PROMPT)), scheduled_cached_reqs=cached)


def test_a_handoff_in_chunks_brings_what_forward_and_proposer_wrote(tmp_path: Path, engines: Engines) -> None:
    p, d = engines
    entries = p.model.entries(len(PROMPT))
    prefill, decode = legs(tmp_path, p, d)
    begin(p, d, prefill, decode, entries)
    rest(p, entries)
    assert p.scheduler.request_finished_all_groups(prefill, (P_BLOCKS,)) == (True, None)
    assert p.scheduler.has_pending_push_work()
    p.step()
    d.step_until(lambda: bool(d.ends))
    p.step_until(lambda: bool(p.ends))
    for engine in engines:
        engine.step()  # each end is reported once
    assert (p.ends, d.ends) == ([("finished_sending", "prefill")], [("finished_recving", "decode")])
    for worker in d.workers:
        for layer in LAYERS:
            cache, rows = worker.caches[layer], worker.rows[layer]
            received = torch.cat([cache[block] for block in D_BLOCKS], dim=1)
            assert torch.equal(received[:, :NUM], entries[layer][rows, :NUM]), layer
            assert not received[:, NUM:].any()  # nothing after the interval
            assert not cache[[0, 2, 4, 5, 7]].any()  # nothing in other blocks
    # Each byte is sent once, by one of the ranks that hold it.
    wanted = sum(cache[:, :, 0].numel() for worker in d.workers for cache in worker.caches.values()) // 8 * NUM * 4
    assert sum(worker.connector.worker.counts["bytes"] for worker in d.workers) == wanted


def test_a_leg_that_is_preempted_before_its_end_fails(tmp_path: Path, engines: Engines) -> None:
    """When the V2 runner reports the preemption, it has already zeroed the blocks."""
    p, d = engines
    entries = p.model.entries(len(PROMPT))
    prefill, decode = legs(tmp_path, p, d)
    begin(p, d, prefill, decode, entries)
    rest(p, entries)
    p.step(preempted_req_ids={"prefill"})
    d.step_until(lambda: len(d.ends) > 1)
    assert d.ends == [("finished_recving", "decode"), ("failed_recving", "decode")]
    assert p.scheduler.request_finished_all_groups(prefill, ([],)) == (False, None)
    p.step()
    assert p.ends == []


def test_a_client_that_leaves_gives_both_sides_blocks_back_once(tmp_path: Path, engines: Engines) -> None:
    p, d = engines
    prefill, decode = legs(tmp_path, p, d)
    begin(p, d, prefill, decode, p.model.entries(len(PROMPT)))
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
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sorted(node.lineno for node in found if ast.unparse(node.func) == method)


def test_vllm_still_ends_a_step_after_the_proposer() -> None:
    """The connector declares tokens final in `post_forward`, including the drafter's: they must have been written."""
    runner = model_runner.GPUModelRunner
    execute, sample = (
        ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
        for method in (runner.execute_model, runner.sample_tokens)
    )
    end = "self.kv_connector.post_forward"
    assert not calls(execute, end)
    (proposed,) = calls(sample, "self.speculator.propose")
    # Stages that do not draft end their step in a separate branch, right after the forward.
    if calls(sample, "self.kv_connector.finalize_step"):  # vLLM 0.33 calls `wait_for_save` there
        last = calls(sample, end)[-1]
        assert "defer_finalize=" in inspect.getsource(runner.sample_tokens)
        assert last < proposed < calls(sample, "self.kv_connector.finalize_step")[-1]
        return
    (stage,) = (
        node
        for node in ast.walk(sample)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "not self.is_last_pp_rank" and calls(node, end)
    )
    assert isinstance(stage.body[-1], ast.Return)
    early, last = calls(sample, end)
    assert calls(stage, end) == [early]
    assert early < proposed < last
