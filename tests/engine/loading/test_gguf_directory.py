"""GGUF files as models: served like any checkpoint, and refused by name before weights are read."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("gguf")

from baton import LLM, SamplingParams
from baton.engine.config import EngineConfig
from baton.engine.loading.gguf_directory import gguf_directory
from baton.errors import CheckpointError, ConfigError
from baton.models.loading.config_json import read_config
from baton.models.loading.gguf_weights import GgufWeights
from testkit.checkpoints.common import make_checkpoint
from testkit.checkpoints.gguf_files import Type, byte_level, write_gguf
from testkit.engines import pair, random_prompt, stepped

SIZE = len(byte_level()["tokenizer.ggml.tokens"])
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain = make_checkpoint(tmp_path / "plain", "llama", 3, vocab_size=SIZE, intermediate_size=96)

    def make(name: str = "tiny.gguf", **more: Any) -> Path:
        (tmp_path / "files").mkdir(exist_ok=True)
        return write_gguf(tmp_path / "files" / name, plain, **more)

    return make


def located(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), kv_cache_memory=4 << 20).check().located()


@pytest.mark.usefixtures("one_thread")
def test_a_quantised_file_is_handed_over_like_its_dequantised_weights(write: Write, tmp_path: Path) -> None:
    file = write(kind=Type.Q8_0)
    config = located(file)
    assert config.served_model_name == str(file)
    assert config.located() == config
    plain = tmp_path / "dequantised"
    plain.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((Path(config.model) / name).read_bytes())
    with GgufWeights(Path(config.model) / "model.gguf") as stored:
        save_file({name: stored.get_tensor(name) for name in stored.keys()}, plain / "model.safetensors")  # noqa: SIM118
    prompts = [random_prompt(length) for length in (1, 7, 33)]
    common = {"speculative_config": None, "kv_cache_memory": 4 << 20}
    with stepped(model=str(plain), **common) as one:
        whole = one.all_of(prompts, GREEDY)
    with pair(tmp_path, {"block_size": "7"}, model=config.model, **common) as two:
        two.check_handoffs(whole, prompts, GREEDY)


def test_it_is_a_model_by_its_path_or_by_its_directory(write: Write) -> None:
    file = write()
    directory = located(file).model
    assert located(file.parent).model == directory
    with LLM(str(file), kv_cache_memory=4 << 20) as llm:
        result = llm.generate(["the pages"], GREEDY)[0]
    assert len(result.outputs[0].token_ids) == 8
    assert result.outputs[0].text


@pytest.mark.parametrize("name", [os.fsdecode(b"caf\xe9.gguf"), "\u4f60" * 80 + ".gguf"], ids=["no text", "long"])
def test_any_name_of_a_file_will_do(name: str, write: Write) -> None:
    assert Path(gguf_directory(write(name), "model"), "model.gguf").is_symlink()


def test_a_rope_factor_without_a_type_is_linear(write: Write) -> None:
    """As in llama.cpp."""
    config = read_config(located(write(**{"llama.rope.scaling.factor": 4.0})).model)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_another_file_at_the_same_path_is_read_anew(write: Write) -> None:
    directory = Path(located(write()).model)
    (directory / "tokenizer.json").write_text("{")
    before = (directory / "config.json").stat().st_mtime_ns
    located(write())
    assert len((directory / "tokenizer.json").read_text()) > 1
    assert (directory / "config.json").stat().st_mtime_ns == before
    located(write(kind=Type.F16))
    assert '"float16"' in (directory / "config.json").read_text()
    assert sorted(os.listdir(directory)) == [
        "config.json",
        "generation_config.json",
        "model.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def patched(file: Path, offset: int, content: bytes) -> Path:
    whole = bytearray(file.read_bytes())
    whole[offset : offset + len(content)] = content
    file.write_bytes(whole)
    return file


def shorter(write: Write) -> Path:
    file = write()
    file.write_bytes(file.read_bytes()[:-5])
    return file


def header_alone(write: Write) -> Path:
    file = write()
    file.write_bytes(file.read_bytes()[:300])
    return file


def other_content(content: bytes) -> Callable[[Write], Path]:
    def make(write: Write) -> Path:
        file = write()
        file.write_bytes(content)
        return file

    return make


def handmade(*values: tuple[str, int, bytes], tensors: bytes = b"", counts: tuple[int, int] = (0, 0)) -> bytes:
    """A header of `values` (name, type, bytes). `counts`: more tensors, and more values, than there are."""
    named = b"".join(counted(name.encode()) + struct.pack("<I", kind) + value for name, kind, value in values)
    return b"GGUF" + struct.pack("<IQQ", 3, counts[0], len(values) + counts[1]) + named + tensors


def counted(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(name: str, offset: int) -> bytes:
    return counted(name.encode()) + struct.pack("<IQQIQ", 2, 4, 4, 0, offset)


def sparse(content: bytes) -> Callable[[Write], Path]:
    """A file of 64 GiB, nearly all of it a hole: its numbers may be as large as they like."""

    def make(write: Write) -> Path:
        file = other_content(content)(write)
        os.truncate(file, 64 << 30)
        return file

    return make


LLAMA = ("general.architecture", 8, counted(b"llama"))
# Each would take gigabytes, or minutes.
HUGE = {
    "list of bytes": handmade(LLAMA, ("a", 9, struct.pack("<IQ", 0, 32 << 30))),
    "list of texts": handmade(LLAMA, ("a", 9, struct.pack("<IQ", 8, 4 << 30))),
    "text": handmade(LLAMA, ("a", 8, struct.pack("<Q", 32 << 30))),
    "name": handmade(LLAMA, tensors=struct.pack("<Q", 32 << 30), counts=(1, 0)),
    "values": handmade(LLAMA, counts=(0, 1 << 62)),
    "tensors": handmade(LLAMA, counts=(1 << 62, 0)),
    "many lists": handmade(*[("a" * n, 9, struct.pack("<IQ", 0, 1 << 20) + bytes(1 << 20)) for n in range(1, 10)]),
}
HEAD_DIMS = [f"llama.{name}" for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")]
FACTORS = {"rope_freqs.weight": torch.ones(8)}
REFUSED: dict[str, tuple[Callable[[Write], Path], list[str]]] = {
    "architecture": (
        lambda write: patched(write(), write().read_bytes().index(b"\x05\0\0\0\0\0\0\0llama") + 8, b"bloom"),
        ["general.architecture is 'bloom'", "llama, qwen2, qwen3, qwen3moe", "safetensors"],
    ),
    "adapter": (lambda write: write(**{"general.type": "adapter"}), ["general.type is 'adapter'"]),
    "parts": (lambda write: write(**{"split.count": 3}), ["one of 3 files", "llama-gguf-split --merge"]),
    "rope": (lambda write: write(**{"llama.rope.scaling.type": "longrope"}), ["rope.scaling.type is 'longrope'"]),
    "rope parameter": (
        lambda write: write(
            **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            **{"llama.rope.scaling.attn_factor": 3.0},
        ),
        ["llama.rope.scaling.attn_factor is not supported"],
    ),
    "partial rotation": (lambda write: write(**{"llama.rope.dimension_count": 8}), ["rope.dimension_count is 8", "16"]),
    "scale": (lambda write: write(**{"llama.logit_scale": 0.5}), ["llama.logit_scale is 0.5"]),
    "experts": (lambda write: write(**{"llama.expert_weights_scale": 2.5}), ["llama.expert_weights_scale is 2.5"]),
    "window": (lambda write: write(**{"llama.attention.sliding_window": 64}), ["attention.sliding_window is 64"]),
    "heads by layer": (lambda write: write(**{"llama.attention.head_count": [4, 4, 2]}), ["differs between layers"]),
    "field": (lambda write: write(**{"llama.block_count": None}), ["llama.block_count is missing"]),
    "vocabulary": (lambda write: write(**{"tokenizer.ggml.pre": "bloom"}), ["tokenizer.ggml.pre is 'bloom'"]),
    "truncated": (shorter, ["truncated, its last 5 bytes", "download it again"]),
    "header": (header_alone, ["truncated or no GGUF file"]),
    "pointer": (other_content(b"version https://git-lfs.github.com/spec/v1\n"), ["version https://git-lf", "no GGUF"]),
    "empty": (other_content(b""), ["no GGUF file"]),
    "version": (lambda write: patched(write(), 4, struct.pack("<I", 1)), ["has version 1, expected 2 or 3"]),
    "big-endian": (lambda write: patched(write(), 4, struct.pack(">I", 3)), ["is big-endian"]),
    **{f"huge {name}": (sparse(content), ["truncated or no GGUF file"]) for name, content in HUGE.items()},
    "name twice": (other_content(handmade(LLAMA, LLAMA)), ["the name 'general.architecture' occurs twice"]),
    "name of lines": (
        other_content(handmade(LLAMA, tensors=tensor("a\n\x1b[31m", 0), counts=(1, 0))),
        [r"the name 'a\n\x1b[31m' is not printable"],
    ),
    "alignment": (other_content(handmade(("general.alignment", 6, bytes(4)))), ["general.alignment is 0.0"]),
    "overlap": (
        other_content(
            handmade(LLAMA, tensors=tensor("output.weight", 0) + tensor("a", 32), counts=(2, 0)) + bytes(256)
        ),
        ["tensor a overlaps the one before it"],
    ),
    "list as type": (lambda write: write(**{"general.type": [1] * 9000}), ["general.type is [1, 1, 1, 1, 1, 1, ...]"]),
    "no integer": (
        lambda write: write(**{"llama.attention.head_count": True}),
        ["head_count is True, expected"],
    ),
    "endless head": (
        lambda write: write(further=FACTORS, **dict.fromkeys(HEAD_DIMS, 4294967294)),
        ["llama.rope.dimension_count is 4294967294, expected an integer from 1 to"],
    ),
    "factors": (lambda write: write(further={"rope_freqs.weight": torch.ones(9)}), ["is not 8 numbers in float32"]),
    "no factors": (
        lambda write: write(further={"rope_freqs.weight": torch.full((8,), torch.nan)}),
        ["rope_freqs.weight with rope.freq_base 10000.0 is not supported"],
    ),
    "end token": (lambda write: write(**{"tokenizer.ggml.eot_token_id": [3]}), ["eot_token_id is [3], of"]),
    "template": (
        lambda write: write(**{"tokenizer.chat_template": 5}),
        ["chat_template is 5, expected a text"],
    ),
    "tokens": (lambda write: write(**{"tokenizer.ggml.tokens": [1, 2]}), ["ggml.tokens is a list of numbers"]),
    "counts": (lambda write: patched(write(), 16, struct.pack("<Q", 1 << 60)), ["truncated or no GGUF file"]),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(make: Callable[[Write], Path], words: list[str], write: Write) -> None:
    file = make(write)
    with pytest.raises(CheckpointError) as caught:
        located(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [("blk.0.attn_q.weight", 99, "has the unknown type 99"), ("blk.0.attn_q.weight", 16, "no whole blocks")],
)
def test_tensors_of_other_types_are_refused_by_name(name: str, kind: int, words: str, write: Write) -> None:
    file = write()
    at = file.read_bytes().index(name.encode()) + len(name) + 4 + 2 * 8
    with pytest.raises(CheckpointError, match=f"tensor {name} .*{words}"):
        located(patched(file, at, struct.pack("<I", kind)))


def test_unknown_tensors_are_refused_by_name(write: Write) -> None:
    file = write()
    at = file.read_bytes().index(b"blk.2.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"unexpected tensor blk\.2\.ffn_pu\.weight"):
        located(patched(file, at, b"blk.2.ffn_pu.weight"))


def test_of_several_files_one_is_to_be_named(write: Write) -> None:
    one, _ = write("one.gguf"), write("two.gguf")
    with pytest.raises(CheckpointError, match=r"one\.gguf, two\.gguf: 2 GGUF files: name one of them"):
        located(one.parent)


def test_errors_of_a_gguf_file_name_what_is_missing(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^model: /models/x\.gguf: no such file"):
        EngineConfig(model="/models/x.gguf").check().located()
    file = write()
    with pytest.raises(ConfigError, match=r"^revision: is for a model of the hub"):
        EngineConfig(model=str(file), revision="main").check().located()
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ConfigError, match=r"^model: .*XDG_CACHE_HOME"):
        gguf_directory(file, "model")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    with monkeypatch.context() as nobody:
        nobody.setitem(sys.modules, "pwd", None)
        with pytest.raises(ConfigError, match=r"^model: .*home.*XDG_CACHE_HOME"):
            gguf_directory(file, "model")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[gguf\]'"):
        gguf_directory(file, "model")
