"""Gemma 4: logits of transformers in every shape, batch-invariant rows, bytes per token, and refused configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.config import EngineConfig
from baton.engine.loading.servable import check_servable
from baton.engine.memory.kv_memory import model_groups
from baton.errors import CheckpointError, ConfigError
from baton.models.architectures.gemma4 import Gemma4
from baton.models.layer_cache import SharedLayerSpec
from baton.models.layers.linear import Build
from baton.models.layers.parallel import Stage, TensorRank
from baton.models.loading.loader import load_model
from testkit.checkpoints.gemma4 import GEMMA4_SHAPES, make_gemma4
from tests.models.test_against_transformers import LENGTH, assert_logits_match, prompt, reference, run

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("shape", GEMMA4_SHAPES)
def test_logits_match(shape: str, tmp_path: Path) -> None:
    best = assert_logits_match(make_gemma4(tmp_path, shape)).topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.05


@pytest.mark.parametrize("shape", ["gemma4-odd", "gemma4-experts"])
def test_bfloat16_stays_close(shape: str, tmp_path: Path) -> None:
    path = make_gemma4(tmp_path, shape, dtype=torch.bfloat16)
    model = load_model(path)
    ids = prompt(model)
    states = reference(path, ids, torch.bfloat16)
    exact = run(load_model(path, "float32"), ids, "paged_cpu", [LENGTH])
    ours = (run(model, ids, "paged_cpu", [LENGTH]) - exact).abs().mean()
    theirs = (states.logits[0].float() - exact).abs().mean()
    assert ours < 1.5 * theirs
    embedded = model.model.embed_tokens(ids) * model.config.embedding_multiplier
    assert torch.equal(embedded, states.hidden_states[0][0])


@pytest.mark.parametrize(("shape", "dtype"), [("gemma4-odd", "float32"), ("gemma4-experts", "bfloat16")])
def test_rows_are_equal_to_the_bit(shape: str, dtype: str, tmp_path: Path) -> None:
    """With any chunks and page size."""
    model = load_model(make_gemma4(tmp_path, shape), dtype, batch_invariant=True)
    ids = prompt(model)
    whole = run(model, ids, "paged_cpu", [LENGTH])
    cuts: list[tuple[list[int], int]] = [([1] * LENGTH, 16), ([3, 48, 48, 4, 47], 7), ([64, 1, 85], 1)]
    assert all(torch.equal(run(model, ids, "paged_cpu", *cut), whole) for cut in cuts)


def test_of_a_checkpoint_with_images_the_text_model_is_loaded(tmp_path: Path) -> None:
    path = make_gemma4(tmp_path)
    ids = prompt(load_model(path), 20)
    expected = run(load_model(path), ids, "paged_cpu", [20])
    raw = json.loads((path / "config.json").read_text())
    outer = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": raw}
    (path / "config.json").write_text(json.dumps(outer))
    weights = load_file(path / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    # Layers that share store keys and values too, which nothing reads.
    moved["model.language_model.layers.4.self_attn.k_proj.weight"] = torch.zeros(32, 48)
    moved["model.vision_tower.patch_embedder.weight"] = torch.zeros(4)
    save_file(moved, path / "model.safetensors", metadata={"format": "pt"})
    check_servable(path)
    assert torch.equal(run(load_model(path), ids, "paged_cpu", [20]), expected)


# Four windowed layers, then a full one; the last 20 share.
LARGE: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 20,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
}


def test_layers_that_share_have_no_pages() -> None:
    """Bytes of a request of 8,192 tokens by hand, in bfloat16: three full layers with one head of 512, whole, and
    twelve windowed ones with one head of 256, of which the last 512 tokens are kept."""
    model = Gemma4(Gemma4.parse_config(LARGE), Build(torch.bfloat16, torch.device("meta")))
    assert model.kv_layers[15:] == ([SharedLayerSpec(13)] * 4 + [SharedLayerSpec(14)]) * 4
    windowed, full = model_groups(EngineConfig("model", block_size=16), model, None)
    assert (windowed.layer_ids, windowed.window) == (tuple(i for i in range(15) if i % 5 < 4), 513)
    assert (full.layer_ids, full.window) == ((4, 9, 14), None)
    wanted = {group.name: len(group.rules.wanted(8192, 0)) for group in (windowed, full)}
    assert wanted == {windowed.name: 512, full.name: 8192}
    num_bytes = [wanted[g.name] * g.page_bytes // g.page_size for g in (windowed, full)]
    assert num_bytes == [512 * 12 * 2 * 256 * 2, 8192 * 3 * 2 * 512 * 2]
    # All 35 layers would take 2.3 times as much.
    assert sum(num_bytes) == 56_623_104


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_kv_shared_layers": 35}, "leaves no layer of (sliding|full)_attention with keys"),
        ({"num_kv_shared_layers": 31}, "leaves no layer of full_attention with keys of its own"),
        ({"vocab_size_per_layer_input": 65}, "vocab_size_per_layer_input is 65, vocab_size 64"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, "per_layer_config must give all full layers the same"),
        ({"per_layer_config": {str(i): {"rank": 1} for i in range(4, 35, 5)}}, "per_layer_config must give"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .* expected an object for each type"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "full layers have 3 heads of 512",
        ),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"enable_moe_block": True}, "num_experts is missing"),
    ],
)
def test_unsupported_config_fields_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Gemma4.parse_config({**LARGE, **fields})


@pytest.mark.parametrize(
    ("fields", "words"), [({}, "per-layer inputs"), ({"hidden_size_per_layer_input": 0}, "keys and values that layers")]
)
def test_stages_that_would_exchange_more_are_refused(fields: dict[str, Any], words: str) -> None:
    build = Build(torch.float32, torch.device("meta"), ranks=TensorRank(stage=Stage(0, 2)))
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size: is 2, and stages do not exchange {words}"):
        Gemma4(Gemma4.parse_config({**LARGE, **fields}), build)


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    theirs, ours = transformers.Gemma4TextConfig(), Gemma4.parse_config({})
    expected = {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.mlp_sizes[0],
        "num_hidden_layers": ours.num_layers,
        "num_attention_heads": ours.num_heads,
        "num_key_value_heads": ours.num_kv_heads,
        "max_position_embeddings": ours.max_position,
        "rms_norm_eps": ours.rms_eps,
        "tie_word_embeddings": ours.tie_word_embeddings,
        "sliding_window": ours.windows[0],
        "hidden_size_per_layer_input": ours.per_layer_size,
        "attention_k_eq_v": ours.k_is_v,
        "final_logit_softcapping": ours.softcap,
    }
    assert {name: getattr(theirs, name) for name in expected} == expected
    assert [window is not None for window in ours.windows] == [t == "sliding_attention" for t in theirs.layer_types]
    for layer, found in enumerate(theirs.per_layer_config):
        spec = ours.spec(layer)
        assert (found.num_key_value_heads, found.head_dim) == (spec.num_kv_heads, spec.head_dim)
    assert ours.layer_ropes[0].theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    assert ours.rope.params["partial_rotary_factor"] == 0.25
