"""EAGLE and EAGLE-3 against a plain implementation of their equations, and every reason to refuse a head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.drafters.eagle3 import aux_layer_ids
from baton.drafters.head import HeadDrafter
from baton.drafters.registry import load_drafter
from baton.engine.attention.registry import get_backend
from baton.errors import CheckpointError, ConfigError
from baton.models.base import CausalLM
from baton.models.loading.loader import load_model
from testkit.checkpoints.common import make_drafter
from testkit.handoffs.paged import PagedSequence

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS, HEADS, GROUPS, SIZE = 40, 4, 2, 16


def head(tmp_path: Path, target_path: Path, method: str, **options: Any) -> Path:
    return make_drafter(tmp_path / method, method, target_path, **options)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def attention(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal attention of a whole sequence with rotary positions from 0, written out."""
    heads = {
        part: F.linear(x, weights[f"self_attn.{part}_proj.weight"]).view(len(x), -1, SIZE).double() for part in "qkv"
    }
    frequency = 10000.0 ** (-torch.arange(0, SIZE, 2).double() / SIZE)
    turn = torch.polar(torch.ones(1).double(), torch.arange(len(x)).double()[:, None] * frequency)[:, None]

    def rotate(z: Tensor) -> Tensor:
        turned = torch.complex(*z.chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag), -1)

    q, k, v = rotate(heads["q"]), rotate(heads["k"]), heads["v"]
    k, v = (z.repeat_interleave(HEADS // GROUPS, 1) for z in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
    return F.linear(out.reshape(len(x), -1).float(), weights["self_attn.o_proj.weight"])


def mlp(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    gate, up = (F.linear(x, weights[f"mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    return F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"])


def layer_weights(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


@torch.inference_mode()
def run(
    drafter: HeadDrafter, ids: Tensor, features: Tensor, chunks: list[int], first: bool = True
) -> tuple[Tensor, Tensor]:
    sequence = PagedSequence(drafter.kv_layers, get_backend(None, "cpu"))
    parts, start = [], 0
    for size in chunks:
        rows = slice(start, start + size)
        parts.append(drafter(ids[rows], features[rows], sequence.rows(start, start + size), sequence, first))
        start += size
    out, feedback = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(feedback)


def inputs(width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 260, (TOKENS,), generator=generator), torch.randn(TOKENS, width, generator=generator)


def test_eagle_follows_its_equations(tmp_path: Path, target_path: Path, target: CausalLM) -> None:
    path = head(tmp_path, target_path, "eagle")
    weights = load_file(path / "model.safetensors")
    assert "layers.0.input_layernorm.weight" not in weights
    drafter = load_drafter("eagle", path, target)
    ids, features = inputs(64)
    layer = layer_weights(weights, "layers.0.")
    x = F.linear(torch.cat((target.model.embed_tokens(ids), features), -1), weights["fc.weight"])
    x = x + attention(layer, x)
    x = x + mlp(layer, norm(x, layer["post_attention_layernorm.weight"]))
    for chunks in ([TOKENS], [1, 30, 9]):
        out, feedback = run(drafter, ids, features, chunks)
        torch.testing.assert_close(out, x, rtol=1e-4, atol=1e-4)
        assert torch.equal(out, feedback)
    assert drafter.aux_layers == ()
    assert drafter.feature_size == 64
    assert drafter.draft_to_target is None
    # Neither embedding nor LM head are in the file: both are the target's.
    assert torch.equal(drafter.compute_logits(x), target.compute_logits(x))
    assert torch.equal(drafter.combine(features, []), features)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_eagle3_follows_its_equations(
    tmp_path: Path, target_path: Path, target: CausalLM, norm_before_residual: bool, first: bool
) -> None:
    path = head(tmp_path, target_path, "eagle3", norm_before_residual=norm_before_residual, draft_vocab_size=100)
    weights = load_file(path / "model.safetensors")
    drafter = load_drafter("eagle3", path, target)
    ids, features = inputs(192 if first else 64)
    layer = layer_weights(weights, "midlayer.")
    h = F.linear(features, weights["fc.weight"]) if first else features
    normed = norm(h, layer["hidden_norm.weight"])
    residual = normed if norm_before_residual else h
    embeds = norm(target.model.embed_tokens(ids), layer["input_layernorm.weight"])
    x = residual + attention(layer, torch.cat((embeds, normed), -1))
    x = x + mlp(layer, norm(x, layer["post_attention_layernorm.weight"]))
    for chunks in ([TOKENS], [7, 1, 32]):
        out, feedback = run(drafter, ids, features, chunks, first)
        torch.testing.assert_close(feedback, x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out, norm(x, weights["norm.weight"]), rtol=1e-4, atol=1e-4)
    logits = drafter.compute_logits(out)
    assert logits.shape == (TOKENS, 100)
    torch.testing.assert_close(logits, F.linear(out, weights["lm_head.weight"]))


def test_reduced_vocabulary_maps_offsets_to_target_ids(tmp_path: Path, target_path: Path, target: CausalLM) -> None:
    path = head(tmp_path, target_path, "eagle3", draft_vocab_size=100)
    weights = load_file(path / "model.safetensors")
    drafter = load_drafter("eagle3", path, target)
    assert drafter.draft_to_target is not None
    # t2d marks exactly the target ids that d2t (offsets) maps to.
    assert torch.equal(drafter.draft_to_target, weights["t2d"].nonzero()[:, 0])
    draft_ids = torch.tensor([[0, 99], [5, 5]])
    assert torch.equal(drafter.draft_to_target[draft_ids], (weights["d2t"] + torch.arange(100))[draft_ids])


def test_eagle3_features_are_the_target_streams_side_by_side(
    tmp_path: Path, target_path: Path, target: CausalLM
) -> None:
    drafter = load_drafter("eagle3", head(tmp_path, target_path, "eagle3"), target)
    assert drafter.aux_layers == (0, 1, 3)
    assert drafter.feature_size == 192
    ids, _ = inputs(1)
    sequence = PagedSequence(target.kv_layers, get_backend(None, "cpu"))
    with torch.inference_mode():
        hidden, aux = target(ids, sequence.rows(0, TOKENS), sequence, drafter.aux_layers)
    features = drafter.combine(hidden, aux)
    assert features.shape == (TOKENS, 192)
    assert torch.equal(features[:, :64], target.model.embed_tokens(ids))
    assert drafter.draft_to_target is None


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@torch.inference_mode()
def test_rows_of_a_batch_invariant_drafter_are_equal_to_the_bit(tmp_path: Path, target_path: Path, method: str) -> None:
    target = load_model(target_path, batch_invariant=True)
    drafter = load_drafter(method, head(tmp_path, target_path, method), target, batch_invariant=True)
    ids, features = inputs(drafter.feature_size)
    whole = run(drafter, ids, features, [TOKENS])
    for chunks in ([1] * TOKENS, [3, 30, 7]):
        for ours, expected in zip(run(drafter, ids, features, chunks), whole, strict=True):
            assert torch.equal(ours, expected)
    logits = drafter.compute_logits(whole[0])
    assert torch.equal(drafter.compute_logits(whole[0][5:6]), logits[5:6])


def test_default_auxiliary_layers() -> None:
    assert aux_layer_ids({}, 32) == (2, 16, 29)
    assert aux_layer_ids({"eagle_aux_hidden_state_layer_ids": [20, 1, 8]}, 32) == (1, 8, 20)
    assert aux_layer_ids({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, 4) == (1, 2)
    assert aux_layer_ids({"eagle_config": {"use_aux_hidden_state": False}}, 4) == ()


@pytest.mark.parametrize(("raw", "layers"), [({}, 4), ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, 4), ({}, 2)])
def test_auxiliary_layers_that_the_target_lacks_are_refused(raw: Any, layers: int) -> None:
    with pytest.raises(CheckpointError, match="eagle_aux_hidden_state_layer_ids"):
        aux_layer_ids(raw, layers)


def edit(path: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **(config or {})}))
    merged = {**load_file(path / "model.safetensors"), **(tensors or {})}
    kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_own_embedding_and_other_names(tmp_path: Path, target_path: Path, target: CausalLM, method: str) -> None:
    path = head(tmp_path, target_path, method)
    own = torch.randn(260, 64, generator=torch.Generator().manual_seed(4))
    ids, features = inputs(load_drafter(method, path, target).feature_size)
    edit(path, tensors={"embed_tokens.weight": own})
    drafter = load_drafter(method, path, target)
    assert torch.equal(drafter._embed(ids), own[ids])
    expected = run(drafter, ids, features, [TOKENS])
    stored = load_file(path / "model.safetensors")
    renamed = {"model." + n.replace("midlayer.", "layers.0."): w for n, w in stored.items() if "lm_head" not in n}
    save_file({**renamed, **{n: w for n, w in stored.items() if "lm_head" in n}}, path / "model.safetensors")
    again = run(load_drafter(method, path, target), ids, features, [TOKENS])
    assert torch.equal(again[0], expected[0])


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_head_for_another_hidden_size(tmp_path: Path, target_path: Path, checkpoint: Any, method: str) -> None:
    wide = load_model(checkpoint("llama", hidden_size=96))
    with pytest.raises(CheckpointError, match=r"64.* 96"):
        load_drafter(method, head(tmp_path, target_path, method), wide)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_head_for_another_vocabulary(tmp_path: Path, target_path: Path, checkpoint: Any, method: str) -> None:
    other = load_model(checkpoint("llama", vocab_size=300))
    with pytest.raises(CheckpointError, match=r"260.* 300"):
        load_drafter(method, head(tmp_path, target_path, method), other)


def test_narrow_head_with_an_embedding_of_its_own(tmp_path: Path, target_path: Path, target: CausalLM) -> None:
    """A head may be narrower than its target if its config says so and it has its own embedding and LM head."""
    path = head(tmp_path, target_path, "eagle3", draft_vocab_size=100)
    edit(path, {"target_hidden_size": 64, "hidden_size": 32})
    with pytest.raises(CheckpointError, match="embed_tokens"):
        load_drafter("eagle3", path, target)


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({}, {"midlayer.hidden_norm.weight": None}, "missing tensor layers.0.hidden_norm.weight"),
        ({}, {"extra.weight": torch.ones(1)}, "unexpected tensor extra.weight"),
        ({}, {"fc.weight": torch.ones(64, 128)}, r"fc.weight has shape \[64, 128\], expected \[64, 192\]"),
        ({}, {"d2t": None}, "no tensor d2t"),
        ({}, {"lm_head.weight": None}, "no lm_head.weight"),
        ({}, {"d2t": torch.full((100,), 200)}, "d2t maps outside"),
        ({}, {"d2t": torch.full((100,), -1)}, "d2t maps outside"),
        ({"draft_vocab_size": 90}, {}, r"expected \[90"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, {}, "layers in 0..3"),
        ({"eagle_config": 3}, {}, "eagle_config"),
        ({"model_type": "gpt2"}, {}, "gpt2"),
    ],
)
def test_broken_heads_are_refused(
    tmp_path: Path,
    target_path: Path,
    target: CausalLM,
    config: dict[str, Any],
    tensors: dict[str, Tensor | None],
    words: str,
) -> None:
    path = head(tmp_path, target_path, "eagle3", draft_vocab_size=100)
    edit(path, config, tensors)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_drafter("eagle3", path, target)
    assert "\n" not in str(caught.value)


def test_weights_of_a_drafter_that_are_no_numbers_are_named(
    tmp_path: Path, target_path: Path, target: CausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    path = head(tmp_path, target_path, "eagle3")
    edit(path, tensors={"fc.weight": torch.full((64, 192), torch.nan)})
    load_drafter("eagle3", path, target)
    assert [r.getMessage() for r in caplog.records] == [f"{path}: weights are NaN or infinite: fc.weight"]


def test_a_missing_drafter_checkpoint_is_refused(tmp_path: Path, target_path: Path, target: CausalLM) -> None:
    path = head(tmp_path, target_path, "eagle")
    with pytest.raises(ConfigError, match=r"speculative_config.method: 'medusa' is unknown"):
        load_drafter("medusa", path, target)
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[64, 128\]"):
        load_drafter("eagle3", path, target)
    edit(path, {"add_para_norm": True})
    with pytest.raises(CheckpointError, match="add_para_norm"):
        load_drafter("eagle", path, target)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        load_drafter("eagle", path, target)
