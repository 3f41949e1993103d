"""A stranger's checkpoint directories: each ends in one error that names the file, and runs none of its code."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from baton.errors import BatonError, CheckpointError, ConfigError, RequestError
from baton.models.loading.loader import load_model
from baton.text import Tokenizer
from testkit.checkpoints.common import make_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama")


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self.path,)


def test_pickled_weights_run_nothing(model: Path, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    (model / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors"):
        torch.save({"x": _Bomb(str(trap))}, model / name)
        with pytest.raises(CheckpointError, match=r"pickle checkpoints are refused|not a safetensors file"):
            load_model(model)
    assert not trap.exists()


def header(tensors: dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 64,
        header({}, length=1 << 62),
        header({"lm_head.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
        header({"lm_head.weight": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}, bytes(16)),
        header({"lm_head.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, bytes(12)),
        header({"lm_head.weight": {"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 16]}}, bytes(16)),
        header({"lm_head.weight": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, bytes(16)),
        header(
            {
                "lm_head.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
            },
            bytes(24),
        ),
        header({"lm_head.weight": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
        header({"../../x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
    ],
)
def test_safetensors_with_false_headers_are_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors|missing tensor"):
        load_model(model)


def test_an_index_leads_nowhere_else(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    (model / "model.safetensors").unlink()  # which would take precedence
    for name in ("../model/model.safetensors", "/etc/passwd", "a/b", ".."):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        with pytest.raises(CheckpointError, match="outside the checkpoint directory"):
            load_model(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"hidden_size": 10**15},
        {"hidden_size": 1 << 70},
        {"vocab_size": 10**12},
        {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
        {"head_dim": 10**12},
        {"hidden_size": "64"},
        {"hidden_size": 64.5},
        {"hidden_size": [64]},
        {"rms_norm_eps": "nan"},
        {"rope_theta": -1},
        {"rope_scaling": {"rope_type": "__class__"}},
        {"rope_scaling": "linear"},
        {"model_type": "../../x"},
        {"model_type": ["llama"]},
        {"torch_dtype": "__reduce__"},
        {"quantization_config": {"quant_method": "x"}},
    ],
    ids=str,
)
def test_config_json_that_asks_for_too_much(model: Path, changes: dict[str, Any]) -> None:
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(CheckpointError) as refused:
        load_model(model)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"1e999999", b"null", b'"x"'])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_json_that_is_not_what_it_should_be(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    load: Callable[[Path], object] = load_model if name == "config.json" else Tokenizer.load
    with pytest.raises(CheckpointError, match=name) as refused:
        load(model)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("eos", [["x"], [[]], "x", {"a": 1}, [None]])
def test_eos_ids_that_are_none(model: Path, eos: object) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Tokenizer.load(model)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{% set x = messages.append(1) %}",
        "{{ 1 / 0 }}",
        "{{ 'x' * 10 ** 30 }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[99].content }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_chat_templates_get_no_python(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(model)
    with pytest.raises(RequestError, match="chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "[]", '"x"', '{"nonsense": 1}', "{", '{"kv_transport": 1}'])
def test_hostile_json_in_flags_is_refused_by_name(text: str) -> None:
    if text != "null":
        with pytest.raises(ConfigError, match="kv_transfer_config"):
            KVTransferConfig.parse(text)
    with pytest.raises(ConfigError, match="speculative_config"):
        SpeculativeConfig.parse(text)


@pytest.mark.parametrize("engine_id", ["", "a/b", "../x", "a b", "x" * 65, "a\nb", "ä"])
def test_engine_ids_name_no_files(model: Path, engine_id: str) -> None:
    with pytest.raises(ConfigError, match="engine_id"):
        EngineConfig(model=str(model), engine_id=engine_id).check()


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:*", "tcp://*:5555", "tcp://10.1.2.3:0", "tcp://[::]:1"])
def test_an_engine_does_not_start_on_an_open_address_without_keys(model: Path, bind: str) -> None:
    config = EngineConfig(model=str(model), kv_transfer_config=KVTransferConfig.parse({"control_bind": bind}))
    with pytest.raises(BatonError, match=r"control_bind: .* can be reached from other hosts: give --keys DIR"):
        config.check()
