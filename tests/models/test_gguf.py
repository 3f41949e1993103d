"""GGUF files: what is loaded is what was written, or what transformers makes of the same file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf")

from baton.engine.loading.gguf_directory import gguf_directory  # noqa: E402
from baton.errors import CheckpointError  # noqa: E402
from baton.models.loading.checkpoint_digests import fingerprint  # noqa: E402
from baton.models.loading.config_json import read_config  # noqa: E402
from baton.models.loading.filling import weight_table  # noqa: E402
from baton.models.loading.loader import load_model  # noqa: E402
from testkit.checkpoints.common import make_checkpoint  # noqa: E402
from testkit.checkpoints.gguf_files import Type, byte_level, write_gguf  # noqa: E402
from testkit.checkpoints.moe import make_moe_checkpoint  # noqa: E402

VOCABULARY = len(byte_level()["tokenizer.ggml.tokens"])
# Blocks have 32 or 256 numbers.
WIDE = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}

KINDS = [Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K, Type.F16, Type.BF16]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(path: Path, model_type: str, **fields: Any) -> Path:
    if model_type == "qwen3_moe":
        return make_moe_checkpoint(path / "plain", model_type, 1, **{**WIDE, **fields})
    return make_checkpoint(path / "plain", model_type, 1, **{**WIDE, **fields})


def weights_of(path: str | Path, dtype: str = "float32") -> dict[str, Tensor]:
    table = weight_table(load_model(path, dtype))
    return {name: place.tensor.clone() for name, place in table.items()}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 48}),
        ("qwen3_moe", {}),
    ],
)
@pytest.mark.usefixtures("unpacked")
def test_a_file_is_the_checkpoint_that_it_was_made_of(model_type: str, fields: dict[str, Any], tmp_path: Path) -> None:
    plain = made(tmp_path, model_type, **fields)
    directory = gguf_directory(write_gguf(tmp_path / "x.gguf", plain), "model")
    expected, found = weights_of(plain), weights_of(directory)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    stated, usual = read_config(directory), read_config(plain)
    same = ("hidden_size", "head_dim", "rms_norm_eps", "rope_theta", "num_key_value_heads", "tie_word_embeddings")
    assert {name: stated[name] for name in same} == {name: usual[name] for name in same}


@pytest.mark.parametrize(
    "kind", [Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K, Type.F16, Type.BF16], ids=lambda k: k.name
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.usefixtures("unpacked")
def test_weights_and_config_are_those_of_transformers(model_type: str, kind: Type, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    plain = made(tmp_path, model_type, head_dim=64)
    file = write_gguf(tmp_path / "x.gguf", plain, kind)
    directory = gguf_directory(file, "model")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(plain))
    known = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    found, stated = weights_of(directory), read_config(directory)
    assert [name for name, tensor in known["tensors"].items() if not torch.equal(found[name], tensor)] == []
    assert found.keys() == known["tensors"].keys()
    ours = {name: stated.get(name) for name in known["config"] if not name.startswith("_")}
    theirs = {name: value for name, value in known["config"].items() if not name.startswith("_")}
    assert ours == pytest.approx(theirs)
    is_float = kind in (Type.F16, Type.BF16)
    assert stated["gguf_types"] == ([] if is_float else [kind.name])


def test_memory_is_said_when_weights_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = gguf_directory(write_gguf(tmp_path / "x.gguf", made(tmp_path, "llama"), Type.Q8_0), "model")
    with caplog.at_level(logging.INFO):
        model = load_model(directory)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert "weights in GGUF (Q8_0) become bfloat16, 0.0 GiB" in caplog.text


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    plain = made(tmp_path, "llama")
    one = gguf_directory(write_gguf(tmp_path / "one.gguf", plain), "model")
    (tmp_path / "other.gguf").write_bytes((tmp_path / "one.gguf").read_bytes())
    other = gguf_directory(tmp_path / "other.gguf", "model")
    assert one != other
    assert fingerprint(one) == fingerprint(other)
    write_gguf(tmp_path / "other.gguf", plain, Type.F16)
    assert fingerprint(gguf_directory(tmp_path / "other.gguf", "model")) != fingerprint(one)


def test_llama_3_1_keeps_its_scaling(tmp_path: Path) -> None:
    """The factors are those of transformers' `llama3`."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    section = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    section |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=section)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = (500000.0 ** -(torch.arange(0, 64, 2) / 64) / scaled).float()
    plain = made(tmp_path, "llama", head_dim=64, rope_theta=500000.0)
    directory = gguf_directory(write_gguf(tmp_path / "x.gguf", plain, further={"rope_freqs.weight": factors}), "model")
    stated = read_config(directory)["rope_scaling"]
    assert stated == pytest.approx({name: value for name, value in section.items() if name != "rope_theta"})
    load_model(directory)
    other = write_gguf(tmp_path / "y.gguf", plain, further={"rope_freqs.weight": factors * 1.01})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight holds other factors"):
        gguf_directory(other, "model")
