"""Every defect of a checkpoint directory ends in one line that names it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.attention.registry import get_backend
from baton.errors import CheckpointError
from baton.models.layers.linear import Build, Linear
from baton.models.loading.checkpoint_digests import fingerprint, tokenizer_hash
from baton.models.loading.config_json import read_config
from baton.models.loading.filling import weight_table
from baton.models.loading.loader import load_model
from testkit.handoffs.paged import PagedSequence

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def path(checkpoint: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(path / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


def shard(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    names, weight_map = sorted(tensors), {}
    for part in range(2):
        file = f"model-{part + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, path / file)
        weight_map.update(dict.fromkeys(names[part::2], file))
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_missing_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "no such checkpoint directory")


def test_missing_config(path: Path) -> None:
    (path / "config.json").unlink()
    refused(path, "config.json", "no such file")


@pytest.mark.parametrize(
    ("content", "why"), [(b"{", "not valid JSON"), (b"\xff\xfe", "not UTF-8"), (b"[1]", "expected a JSON object")]
)
def test_config_that_is_no_json_object(path: Path, content: bytes, why: str) -> None:
    (path / "config.json").write_bytes(content)
    refused(path, "config.json", why)


def test_missing_weight_file(path: Path) -> None:
    (path / "model.safetensors").unlink()
    refused(path, "model.safetensors", "no such weight file")


def test_pickled_weights_are_refused_by_name(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "pytorch_model.bin", "pickle")


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, 0.999])
def test_truncated_weight_file(path: Path, keep: float) -> None:
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])
    refused(path, "model.safetensors", "truncated")


def test_missing_tensor(path: Path) -> None:
    edit_weights(path, **{"model.layers.1.self_attn.k_proj.weight": None})
    refused(path, "missing tensor model.layers.1.self_attn.k_proj.weight")


def test_many_missing_tensors_are_counted(path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, path / "model.safetensors")
    refused(path, "missing tensor", "and 26 more")


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.bias", "model.layers.1.self_attn.q_norm.weight", "lm_head.bias"]
)
def test_unexpected_tensor_of_a_part_that_the_model_has(path: Path, name: str) -> None:
    edit_weights(path, **{name: torch.ones(2)})
    refused(path, f"unexpected tensor {name}")


def test_wrong_shape(path: Path) -> None:
    edit_weights(path, **{"model.embed_tokens.weight": torch.ones(260, 32)})
    refused(path, "model.embed_tokens.weight", "[260, 32]", "[260, 64]")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gpt_neox"}, ["model_type", "gpt_neox", "llama"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_hidden_layers": "three"}, ["num_hidden_layers", "'three'"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps", "-1"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("inf")}, ["rms_norm_eps", "inf"]),
        ({"dtype": ["bfloat16"]}, ["dtype", "bfloat16"]),
        ({"partial_rotary_factor": float("inf")}, ["partial_rotary_factor", "inf"]),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": float("nan")}},
            ["attention_factor"],
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 10**400}}, ["factor"]),
        (
            {"model_type": "qwen3_moe", "num_experts": 1 << 30, "moe_intermediate_size": 1},
            ["experts", "more than 4096"],
        ),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"torch_dtype": "int8"}, ["dtype", "int8"]),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"rope_theta": 1e308}, ["rope_theta", "float32"]),
        ({"rms_norm_eps": 1e39}, ["rms_norm_eps", "float32"]),
        ({"rope_theta": 1e-300}, ["rope_theta is 1e-300, expected at least 1"]),
        # Making so many takes minutes.
        ({"num_hidden_layers": 4096}, ["num_hidden_layers is 4096, but 3 layers are stored"]),
        ({"num_hidden_layers": 2}, ["num_hidden_layers is 2, but 3 layers are stored"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_type", "longrope", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "linear"]),
        ({"rope_scaling": [1]}, ["rope_parameters", "[1]"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"is_causal": False}, ["is_causal", "False"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["quantization_config", "bitsandbytes"]),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, ["layer_types", "mistral"]),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3}, ["layer_types"]),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, ["use_sliding_window"]),
    ],
)
def test_config_fields_are_named(path: Path, fields: dict[str, Any], words: list[str]) -> None:
    edit_config(path, **fields)
    refused(path, "config.json", *words)


def test_sharded_equals_single(path: Path) -> None:
    single = {name: place.tensor.clone() for name, place in weight_table(load_model(path)).items()}
    shard(path)
    sharded = weight_table(load_model(path))
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name].tensor) for name in single)


def test_missing_shard_and_bad_index(path: Path) -> None:
    shard(path)
    (path / "model-00002-of-00002.safetensors").unlink()
    refused(path, "model-00002-of-00002.safetensors", "no such weight file")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../escape.safetensors"}}))
    refused(path, "outside the checkpoint directory")
    index.write_text("{}")
    refused(path, "weight_map")


@pytest.fixture
def tied(checkpoint: Any, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(checkpoint("qwen3", tie_word_embeddings=True), tmp_path / "tied"))
    edit_weights(copy, **{"lm_head.weight": load_file(copy / "model.safetensors")["model.embed_tokens.weight"].clone()})
    return copy


@pytest.mark.usefixtures("unpacked")
def test_tied_head_is_one_tensor_and_a_stored_copy_is_ignored(tied: Path) -> None:
    model = load_model(tied)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_head_is_packed_beside_the_embedding(tied: Path) -> None:
    model = load_model(tied)
    assert model.lm_head.weight is None
    hidden = torch.randn(5, model.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = hidden @ model.model.embed_tokens.weight.T
    torch.testing.assert_close(model.compute_logits(hidden), expected, rtol=1e-5, atol=1e-5)


def packs_bfloat16() -> bool:
    layer = Linear(64, 64, Build(torch.bfloat16, torch.device("cpu")))
    layer.pack()
    return layer.weight is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_replace_plain_ones(path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one copy of a weight stays, and the model computes the same."""
    if dtype == "bfloat16" and not packs_bfloat16():
        pytest.skip("neither PyTorch nor Baton packs weights of bfloat16 for this CPU")
    ids = torch.arange(40)
    results = []
    for is_packed in (True, False):
        if not is_packed:
            monkeypatch.setattr(Linear, "pack", lambda layer: None)
        model = load_model(path, dtype)
        layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
        assert {layer.weight is None for layer in layers} == {is_packed}
        sequence = PagedSequence(model.kv_layers, get_backend("paged_cpu", "cpu"), model.build.dtype)
        hidden, _ = model(ids, sequence.rows(0, 40), sequence)
        results.append(model.compute_logits(hidden))
    tolerance = 1e-4 if dtype == "float32" else 0.3
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)


def test_dtype_argument(path: Path) -> None:
    assert load_model(path).build.dtype is torch.float32
    assert load_model(path, "bfloat16").build.dtype is torch.bfloat16
    edit_config(path, torch_dtype=None, dtype="bfloat16")
    assert load_model(path).build.dtype is torch.bfloat16
    assert load_model(path, "float").build.dtype is torch.float32


def test_float16_is_computed_in_float32(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """float32 represents every float16 value, so nothing is lost."""
    halves = {name: tensor.half() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(halves, path / "model.safetensors")
    wide = load_model(path, "float32")
    edit_config(path, torch_dtype="float16")
    with caplog.at_level("INFO", logger="baton.models.loading.dtypes"):
        for model in (load_model(path), load_model(path, "float16"), load_model(path, "half")):
            assert model.build.dtype is torch.float32
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, wide.state_dict()[name]), name
    assert [record.getMessage()[:30] for record in caplog.records] == ["float16 is computed in float32"] * 3
    with pytest.raises(CheckpointError, match="int4"):
        load_model(path, "int4")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_named(path: Path, value: float, caplog: pytest.LogCaptureFixture) -> None:
    load_model(path)
    assert not caplog.records
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "koqv"]
    for name in names:
        weight = load_file(path / "model.safetensors")[name]
        weight[-1, -1] = value
        edit_weights(path, **{name: weight})
    load_model(path)
    line = f"{path}: weights are NaN or infinite: {', '.join(names[:3])} and 1 more"
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.usefixtures("unpacked")
def test_merged_linears_keep_their_parts_apart(path: Path) -> None:
    stored, table = load_file(path / "model.safetensors"), weight_table(load_model(path))
    assert stored.keys() == table.keys()
    assert all(torch.equal(stored[name], table[name].tensor) for name in stored)


def test_fingerprint_follows_weights_and_config(path: Path) -> None:
    first = fingerprint(path)
    assert len(first) == 32
    edit_config(path, transformers_version="9.9")
    assert fingerprint(path) == first
    edit_config(path, rope_theta=20000.0)
    second = fingerprint(path)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    edit_weights(path, **weights)
    assert len({first, second, fingerprint(path)}) == 3
    assert read_config(path)["rope_theta"] == 20000.0


def test_names_of_files_that_are_no_text_have_digests(path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9.safetensors")
    (path / "model.safetensors").rename(path / odd)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": odd}}))
    assert len(fingerprint(path)) == 32
    before = tokenizer_hash(path)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / os.fsdecode(b"caf\xe9.jinja")).write_text("a")
    assert tokenizer_hash(path) != before
