"""Drafters of blocks: their drafts are those of transformers, and what is computed differently is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.generation.candidate_generator as candidates
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from baton.drafters.registry import load_drafter
from baton.engine.config import SpeculativeConfig
from baton.engine.executor import LocalExecutor
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.sampling_params import SamplingParams
from testkit.checkpoints.drafters_layers import block_drafter
from testkit.engines import Stepped, note_drafts, pair, stepped
from tests.drafters.reference import assert_round, generate
from tests.drafters.test_drafters import edit
from tests.engine.models.test_transformers_equality import TIE, load_reference

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS, BLOCK = 10, 5
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def assistant(path: Path, target: CausalLM) -> Any:
    """A random drafter of transformers for `target`, and its checkpoint in `path`."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=target.hidden_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["full_attention"] * 2,
        block_size=BLOCK,
        mask_token_id=258,
        # Not the last layer, whose output transformers gives after the target's final norm, and vLLM before it.
        target_layer_ids=[0, 1],
    )
    model = MuseGlimmerAssistantModel(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            # Norms near 1, so that no draft is the same everywhere.
            weight.copy_(
                torch.randn(weight.shape, generator=generator) * (0.2 if weight.dim() > 1 else 0.5)
                + (weight.dim() == 1)
            )
    model.save_pretrained(path)
    return model


def test_drafts_may_differ_at_a_near_tie_alone() -> None:
    logits_DV = torch.tensor([[0.0, 1.0, 1.0 + TIE / 2], [0.0, 3.0, 2.0]])
    assert_round([2, 1], logits_DV)
    assert_round([1, 0], logits_DV)  # the second follows another token
    for drafts in ([0, 1], [2, 2]):
        with pytest.raises(AssertionError, match="other drafts"):
            assert_round(drafts, logits_DV)


@pytest.mark.parametrize(("length", "chunk"), [(1, 4096), (33, 10)])
def test_drafts_are_those_of_transformers(
    length: int, chunk: int, target_path: Path, target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = assistant(tmp_path / "drafter", target)
    prompt = [3 + (7 * i + i * i) % 200 for i in range(length)]
    drafter.generation_config = None
    model, made_by = load_reference(target_path), candidates.DFlashTokenCandidateGenerator
    how = {"assistant_model": drafter, "speculation_type": "dflash"}
    theirs = generate(model, prompt, NUM_TOKENS, made_by, monkeypatch, **how)
    assert len({tuple(d) for d in theirs.drafts().values()}) > 2
    spec = {"method": "dflash", "model": str(tmp_path / "drafter"), "num_speculative_tokens": BLOCK - 1}
    settings = {"model": str(target_path), "speculative_config": SpeculativeConfig.parse(json.dumps(spec))}
    ours = note_drafts(monkeypatch)
    with stepped(**settings, max_num_batched_tokens=chunk) as one:
        got = one.run("r", prompt, GREEDY).token_ids
    theirs.assert_tokens(got)
    assert theirs.assert_rounds(got, ours) > NUM_TOKENS // 2


def test_a_prefill_engine_computes_no_block_and_no_attention(target_path: Path, tmp_path: Path) -> None:
    """Chunks of a prompt cost two projections and two per layer."""
    calls: list[Any] = []
    made = {**block_drafter(tmp_path / "d", target_path, "dflash"), "draft_kv": "prefer"}
    none, some = (SpeculativeConfig.parse(json.dumps({**made, "num_speculative_tokens": k})) for k in (0, 3))
    decode = {"speculative_config": some}
    with pair(tmp_path, decode, model=str(target_path), speculative_config=none) as two:
        layers = [list(runner_of(engine).drafter.layers) for engine in (two.prefill, two.decode)]
        for layer in layers[0] + layers[1]:
            layer.register_forward_hook(lambda layer, *_: calls.append(layer))
        _, rest = two.legs("r", list(range(3, 40)), GREEDY, "push")
        two.step_until(lambda: rest.ended)
        two.settle()
        assert two.decode.core.metrics.num_handoffs["committed"] == 1
        assert set(calls) == set(layers[1])
        assert not set(calls) & set(layers[0])


def test_a_block_has_a_place_for_the_token_before_it(target_path: Path, tmp_path: Path) -> None:
    """Prompts that fill pages but for as many places as drafts, and one more."""
    spec = SpeculativeConfig.parse(json.dumps(block_drafter(tmp_path, target_path, "dflash")))
    prompts = [list(range(3, 3 + length)) for length in range(9, 13)]
    settings = {"model": str(target_path), "kv_cache_memory": 4 << 20, "block_size": 4}
    found = []
    for drafter in (None, spec):
        with stepped(**settings, speculative_config=drafter) as one:
            found.append([stream.token_ids for stream in one.all_of(prompts, GREEDY)])
    assert found[1] == found[0]


def runner_of(engine: Stepped) -> Any:
    assert isinstance(engine.core.executor, LocalExecutor)
    return engine.core.executor.runner


def test_a_markov_head_adds_what_follows_the_token_before(target_path: Path, target: CausalLM, tmp_path: Path) -> None:
    spec = block_drafter(tmp_path, target_path, "dspark")
    drafter = load_drafter("dspark", spec["model"], target)
    stored = load_file(tmp_path / "model.safetensors")
    states = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    before = torch.tensor([5, 5, 9])
    bias = F.linear(stored["markov_head.markov_w1.weight"][before], stored["markov_head.markov_w2.weight"])
    got = drafter.block_logits(states, before)  # type: ignore[attr-defined]
    torch.testing.assert_close(got, target.compute_logits(states) + bias)
    assert not torch.equal(got[0] - target.compute_logits(states)[0], got[2] - target.compute_logits(states)[2])


@pytest.mark.parametrize(
    ("method", "fields", "text"),
    [
        ("dflash", {"dflash_config": {"mask_token_id": 999, "target_layer_ids": [0]}}, "mask_token_id is 999"),
        ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 0]}}, "target_layer_ids is"),
        ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [9]}}, "target_layer_ids is"),
        ("dflash", {"num_target_layers": 36}, "num_target_layers is 36, and the target has 3"),
        ("dflash", {"is_neox_style": False}, "is_neox_style is False"),
        ("dflash", {"model_type": "llama"}, "model_type is 'llama'"),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head_type is 'rnn'"),
        ("dspark", {"markov_rank": 0}, "markov_rank is 0"),
        ("dspark", {"sample_from_anchor": False}, "sample_from_anchor"),
    ],
)
def test_configs_of_other_block_drafters_are_refused(
    method: str, fields: dict[str, Any], text: str, target_path: Path, target: CausalLM, tmp_path: Path
) -> None:
    spec = block_drafter(tmp_path, target_path, method)
    edit(tmp_path, fields)
    with pytest.raises(CheckpointError, match=text):
        load_drafter(method, spec["model"], target)


@pytest.mark.parametrize("num_target_layers", [2, 3, None])
def test_a_narrow_block_drafter_needs_a_head_of_its_own(
    num_target_layers: int | None, target_path: Path, target: CausalLM, tmp_path: Path
) -> None:
    """With the target's, each of its drafts would fail, and with it the request."""
    spec = block_drafter(tmp_path, target_path, "dflash", hidden_size=32, num_target_layers=num_target_layers)
    load_drafter("dflash", spec["model"], target)
    edit(tmp_path, tensors={"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight, .* hidden_size of 64, not 32"):
        load_drafter("dflash", spec["model"], target)
