"""An unsupported model or setting is refused by name before anything is loaded, with an alternative."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.config import EngineConfig, SpeculativeConfig
from baton.errors import CheckpointError
from baton.text import Tokenizer

CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def config(path: Path, **fields: Any) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, **fields}))


def file(name: str, **content: Any) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(json.dumps(content)) and None


def fp8(path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2).to(torch.float8_e4m3fn)}, path / "model.safetensors")


def mistral(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "params.json").write_text("{}")
    save_file({"norm.weight": torch.ones(2)}, path / "consolidated.safetensors")


def lora(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def gguf(path: Path) -> None:
    (path / "model.safetensors").unlink()
    for name in ("model-Q4_K_M.gguf", "model-Q8_0.gguf"):
        (path / name).write_bytes(b"GGUF")


def truncated(path: Path) -> None:
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-3])


def pointer(path: Path) -> None:
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


def shards(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    weight_map = {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}
    file("model.safetensors.index.json", weight_map=weight_map)(path)


def architecture(name: str) -> Callable[[Path], None]:
    return lambda path: config(path, architectures=[name])


REFUSED: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "adapter": (file("adapter_config.json"), ["adapter_config.json", "beside the model", "merge_and_unload"]),
    "adapter alone": (lora, ["adapter_config.json", "'org/base'", "merge_and_unload"]),
    "gguf": (gguf, ["model-Q4_K_M.gguf, model-Q8_0.gguf", "2 GGUF files", "name one"]),
    "mistral": (mistral, ["consolidated.safetensors", "Mistral's own format"]),
    "sentence-transformers": (file("modules.json"), ["modules.json", "makes embeddings", "generate text"]),
    "classifier": (architecture("Qwen2ForSequenceClassification"), ["Qwen2ForSequenceClassification", "reranker"]),
    "reward": (architecture("Qwen2ForRewardModel"), ["Qwen2ForRewardModel", "reward model"]),
    "process reward": (architecture("Qwen2ForProcessRewardModel"), ["reward model"]),
    "images": (architecture("Gemma3ForConditionalGeneration"), ["Gemma3ForConditionalGeneration", "other inputs"]),
    "dual chunks": (
        lambda path: config(path, dual_chunk_attention_config={"chunk_size": 8}),
        ["dual_chunk_attention_config", "remove it"],
    ),
    "mlx": (lambda path: config(path, quantization={"bits": 4}), ["config.json: quantization", "full precision"]),
    "compressed": (lambda path: config(path, compression_config={"format": "x"}), ["compression_config"]),
    "gptq": (file("quantize_config.json", bits=4), ["quantize_config.json", "full precision"]),
    "modelopt": (file("hf_quant_config.json", quantization={}), ["hf_quant_config.json"]),
    "fp8": (fp8, ["model.safetensors: tensor model.norm.weight is F8_E4M3", "full precision"]),
    "truncated": (truncated, ["model.safetensors: truncated", "last 3 bytes", "download it again"]),
    "pointer": (pointer, ["model.safetensors is a pointer", "git lfs pull"]),
    "shards": (shards, ["model-2.safetensors: no such file", "index.json", "download it"]),
    "rope": (lambda path: config(path, rope_scaling={"type": "dynamic"}), ["rope_scaling: 'dynamic'", "yarn"]),
    "rope of layers": (
        lambda path: config(path, rope_parameters={"full_attention": {"rope_type": "longrope"}}),
        ["rope_parameters: 'longrope'"],
    ),
    "named weights": (lambda path: config(path, transformers_weights="x.safetensors"), ["transformers_weights"]),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    config(path)
    save_file({"model.norm.weight": torch.ones(2)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(directory: Path, change: Callable[[Path], None], words: list[str]) -> None:
    settings = EngineConfig(model=str(directory)).check()
    assert settings.located().model == str(directory)
    change(directory)
    with pytest.raises(CheckpointError) as caught:
        settings.located()
    message = str(caught.value)
    assert message.startswith(f"{directory}: ")
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_a_drafter_that_cannot_be_served_is_refused(directory: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "adapter_config.json").write_text("{}")
    spec = SpeculativeConfig.parse({"method": "eagle", "model": str(head)})
    with pytest.raises(CheckpointError, match=r"head: adapter_config\.json"):
        EngineConfig(model=str(directory), speculative_config=spec).check().located()


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x09" + b"\0" * 7 + b"{}"])
def test_headers_that_are_none_are_for_the_loader(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").write_bytes(content)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')
    EngineConfig(model=str(directory)).check().located()


def test_a_quantized_file_that_is_not_used_does_not_matter(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "kept.safetensors")
    fp8(directory)
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    (directory / "kept.safetensors").rename(directory / "model.safetensors")
    EngineConfig(model=str(directory)).check().located()


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_a_tokenizer_in_another_format(directory: Path, name: str) -> None:
    (directory / name).write_text("")
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: no such file beside {name}: AutoTokenizer"):
        Tokenizer.load(directory)
