"""The tensors loaded from a checkpoint directory are those that transformers loads, and the log names the others."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.errors import CheckpointError
from baton.models.loading.filling import weight_table
from baton.models.loading.loader import load_model

pytestmark = pytest.mark.usefixtures("one_thread", "unpacked")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, Tensor]


@pytest.fixture
def path(checkpoint: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("qwen3", tie_word_embeddings=True), tmp_path / "model"))


def write(path: Path, tensors: Tensors, name: str = SINGLE) -> None:
    save_file({key: value.contiguous() for key, value in tensors.items()}, path / name, metadata={"format": "pt"})


def shard(path: Path, tensors: Tensors, count: int = 2) -> None:
    """Write shards and their index beside the existing files."""
    names, weight_map = sorted(tensors), {}
    for part in range(count):
        file = f"model-{part + 1:05}-of-{count:05}.safetensors"
        write(path, {name: tensors[name] for name in names[part::count]}, file)
        weight_map.update(dict.fromkeys(names[part::count], file))
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_same(path: Path) -> None:
    """Every tensor of the model is the one that transformers loads, bit for bit."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()
    ours = load_model(path)
    table = {name: place.tensor for name, place in weight_table(ours).items()}
    table[HEAD] = ours.lm_head.weight
    assert table.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(table[name], theirs[name])]
    assert not different


def other(tensor: Tensor) -> Tensor:
    return torch.flip(tensor, (0,)).contiguous()


def head_alone(tensors: Tensors) -> Tensors:
    return {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def prefix_twice(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {**tensors, HEAD: tensors[EMBEDDING].clone()},
        lambda tensors: {**tensors, HEAD: other(tensors[EMBEDDING])},
        head_alone,
        without_prefix,
        prefix_twice,
        lambda tensors: {**without_prefix(tensors), HEAD: other(tensors[EMBEDDING])},
        lambda tensors: {**tensors, "v_head.summary.weight": torch.ones(1, 64)},
        lambda tensors: {**tensors, "model.layers.3.eh_proj.weight": torch.ones(64, 128)},
        lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    ],
    ids=[
        "equal head",
        "other head",
        "head alone",
        "no prefix",
        "twice",
        "no prefix, other head",
        "extra",
        "layer",
        "r",
    ],
)
@pytest.mark.parametrize("save", [write, shard], ids=["single", "sharded"])
def test_as_transformers_loads_it(
    path: Path, change: Callable[[Tensors], Tensors], save: Callable[[Path, Tensors], None]
) -> None:
    tensors = load_file(path / SINGLE)
    (path / SINGLE).unlink()
    save(path, change(tensors))
    assert_same(path)


def test_a_head_in_another_dtype_is_compared_as_it_is_computed_with(path: Path) -> None:
    """Equal after rounding is equal: transformers compares the loaded tensors."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    tensors = load_file(path / SINGLE)
    write(path, {**tensors, HEAD: tensors[EMBEDDING].bfloat16()})
    assert_same(path)
    model = load_model(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_another_head_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(path / SINGLE)
    write(path, {**tensors, HEAD: other(tensors[EMBEDDING])})
    with caplog.at_level(logging.WARNING, "baton.models.loading.stored"):
        load_model(path)
    assert "tie_word_embeddings is true, but lm_head.weight is stored and differs" in caplog.text


def test_a_single_file_counts_more_than_an_index_left_behind(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(path / SINGLE)
    shard(path, {name: other(tensor) for name, tensor in tensors.items()})
    with caplog.at_level(logging.WARNING, "baton.models.loading.stored"):
        assert_same(path)
    assert "not used: model-00001-of-00002.safetensors, model-00002-of-00002.safetensors" in caplog.text


def test_an_index_of_shards_that_are_gone_does_not_matter_beside_a_single_file(path: Path) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: "model-00001-of-00009.safetensors"}}))
    assert_same(path)


def test_unused_tensors_are_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {f"model.layers.{layer}.eh_proj.weight": torch.ones(1) for layer in range(3, 15)}
    write(path, {**load_file(path / SINGLE), **extra, "v_head.bias": torch.ones(1)})
    with caplog.at_level(logging.WARNING, "baton.models.loading.stored"):
        load_model(path)
    assert "13 tensors are not used by the model: model.layers.10 (1), " in caplog.text
    assert "and 5 more parts" in caplog.text


def test_a_tensor_in_two_shards_is_refused(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    (path / SINGLE).unlink()
    shard(path, tensors)
    second = path / "model-00002-of-00002.safetensors"
    write(path, {**load_file(second), EMBEDDING: tensors[EMBEDDING]}, second.name)
    with pytest.raises(
        CheckpointError, match=r"00002\.safetensors: tensor model\.embed_tokens\.weight is in model-00001"
    ):
        load_model(path)


def test_a_head_of_another_shape_is_refused(path: Path) -> None:
    write(path, {**load_file(path / SINGLE), HEAD: torch.ones(130, 64)})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[130, 64\], expected \[260, 64\]"):
        load_model(path)


def test_an_index_that_names_tensors_which_no_shard_has(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    (path / SINGLE).unlink()
    gone = tensors.pop("model.norm.weight")
    shard(path, tensors)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    assert gone.shape == (64,)
    with pytest.raises(CheckpointError, match=r"missing tensor model\.norm\.weight"):
        load_model(path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_tensors_without_a_config_are_refused(path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path / SINGLE)
    write(path, {**tensors, name: tensors[name].to(dtype)})
    with pytest.raises(CheckpointError, match=f"tensor {name} is .*8.*, quantized weights are not supported"):
        load_model(path)
