"""Checkpoints with quantised weights: what is loaded is what the format's own arithmetic gives."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.errors import CheckpointError
from baton.models.loading.loader import load_model, weight_table
from baton.models.loading.quantized import scheme_of
from testkit.checkpoints.common import make_checkpoint

Parts = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Parts, Tensor]]
GROUP = 16


def blocks(weight: Tensor) -> tuple[Parts, Tensor]:
    """FP8 with a factor for each block of 24 x 40. Sizes are no multiples of it."""
    factors = torch.rand(-(-weight.shape[0] // 24), -(-weight.shape[1] // 40)) + 0.5
    wide = factors.repeat_interleave(24, 0)[: len(weight)].repeat_interleave(40, 1)[:, : weight.shape[1]]
    small = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale_inv": factors}, small.float() * wide


def channels(dtype: torch.dtype) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        scale = weight.abs().amax(dim=1, keepdim=True) / 100
        small = (weight / scale).round().to(dtype)
        # Of activations: ignored.
        return {"weight": small, "weight_scale": scale, "input_scale": torch.ones(1)}, small.float() * scale

    return quantise


def whole(weight: Tensor) -> tuple[Parts, Tensor]:
    small = weight.to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": torch.tensor(2.0)}, small.float() * 2


def words(numbers: Tensor, dim: int, bits: int = 4) -> Tensor:
    """Numbers packed along `dim`, lowest bits first, in int32."""
    each = 32 // bits
    parts = numbers.long().unflatten(dim, (-1, each))
    shifts = (torch.arange(each) * bits).view([each if i == dim + 1 else 1 for i in range(3)])
    packed = (parts << shifts).sum(dim + 1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def grouped(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0..15 [out, in], zeros [out, groups], scales [out, groups]."""
    by_group = weight.unflatten(1, (-1, GROUP))
    scale = (by_group.amax(-1) - by_group.amin(-1)) / 14
    zeros = (-by_group.amin(-1) / scale).round().clamp(1, 15)
    numbers = (by_group / scale[..., None] + zeros[..., None]).round().clamp(0, 15)
    return numbers.flatten(1), zeros, scale


def value(numbers: Tensor, zeros: Tensor | int, scale: Tensor) -> Tensor:
    wide = zeros if isinstance(zeros, int) else zeros.repeat_interleave(GROUP, 1)
    return (numbers - wide) * scale.repeat_interleave(GROUP, 1)


def packed(weight: Tensor) -> tuple[Parts, Tensor]:
    numbers, _, scale = grouped(weight)
    parts = {"weight_packed": words(numbers, 1), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return parts, value(numbers, 8, scale)


def packed_with_zeros(weight: Tensor) -> tuple[Parts, Tensor]:
    numbers, zeros, scale = grouped(weight)
    shape = torch.tensor(weight.shape)
    parts = {"weight_packed": words(numbers, 1), "weight_scale": scale, "weight_shape": shape}
    return {**parts, "weight_zero_point": words(zeros, 0)}, value(numbers, zeros, scale)


def gptq(offset: int) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        numbers, zeros, scale = grouped(weight)
        # Inputs in groups in another order ("desc_act").
        order = torch.randperm(weight.shape[1])
        index = (torch.arange(weight.shape[1]) // GROUP)[order]
        parts = {"qweight": words(numbers[:, order].T.contiguous(), 0), "g_idx": index.int(), "scales": scale.T}
        return {**parts, "qzeros": words((zeros - offset).T.contiguous(), 1)}, value(numbers, zeros, scale)[:, order]

    return quantise


def awq(weight: Tensor) -> tuple[Parts, Tensor]:
    numbers, zeros, scale = grouped(weight)
    # The first word holds columns 0, 2, 4, 6, 1, 3, 5, 7.
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def shuffled(part: Tensor) -> Tensor:
        return words(part.T.unflatten(1, (-1, 8))[..., order].flatten(1), 1)

    return {"qweight": shuffled(numbers), "qzeros": shuffled(zeros), "scales": scale.T}, value(numbers, zeros, scale)


def group(bits: int, form: str) -> dict[str, Any]:
    entry = {"weights": {"num_bits": bits}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": entry}}


CASES: dict[str, tuple[dict[str, Any], Quantise]] = {
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [24, 40]}, blocks),
    "fp8": ({"quant_method": "fp8"}, whole),
    "compressed-tensors fp8": (group(8, "float-quantized"), channels(torch.float8_e4m3fn)),
    "compressed-tensors int8": (group(8, "int-quantized"), channels(torch.int8)),
    "compressed-tensors int4": (group(4, "pack-quantized"), packed),
    "compressed-tensors int4 with zeros": (group(4, "pack-quantized"), packed_with_zeros),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq(1)),
    "gptq v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
}


def quantised(path: Path, config: dict[str, Any], quantise: Quantise) -> dict[str, Tensor]:
    """Quantise the layers' linears, except one as `ignore` does, over two files. Returns what they stand for."""
    file = path / "model.safetensors"
    stored, expected = load_file(file), {}
    made: list[dict[str, Tensor]] = [{}, {}]
    for number, (name, tensor) in enumerate(sorted(stored.items())):
        if not name.endswith("_proj.weight") or "layers.1.mlp.down_proj" in name:
            made[number % 2][name] = expected[name] = tensor
            continue
        parts, expected[name] = quantise(tensor)
        for place, (part, values) in enumerate(sorted(parts.items())):
            made[(number + place) % 2][f"{name.removesuffix('weight')}{part}"] = values.contiguous()
    file.unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensors in zip(names, made, strict=True):
        save_file(tensors, path / name, {"format": "pt"})
    index = {tensor: name for name, tensors in zip(names, made, strict=True) for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    edit(path, config)
    return expected


def edit(path: Path, config: dict[str, Any]) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("case", CASES)
def test_a_weight_is_what_its_parts_stand_for(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    torch.manual_seed(0)
    expected = quantised(tmp_path, *CASES[case])
    with caplog.at_level(logging.INFO):
        table = weight_table(load_model(tmp_path))
    for name, values in expected.items():
        torch.testing.assert_close(table[name].tensor, values, rtol=1e-5, atol=1e-6)
    assert "become float32" in caplog.text


def test_fp8_in_blocks_is_that_of_transformers() -> None:
    reference = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    weight, factors = torch.randn(128, 256).to(torch.float8_e4m3fn), torch.rand(1, 2) + 0.5
    scheme = scheme_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    assert scheme is not None
    found = scheme.dequantise({"weight": weight, "weight_scale_inv": factors})
    assert torch.equal(found, reference._dequantize_one(weight, factors, torch.float32))


@pytest.mark.parametrize(
    ("config", "words_of_it"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        (group(4, "nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        ("int8", "quant_method is 'int8'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_other_formats_are_refused_by_name(config: Any, words_of_it: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    edit(tmp_path, config)
    with pytest.raises(CheckpointError, match=words_of_it):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("case", "part", "change", "words_of_it"),
    [
        ("fp8 in blocks", "weight_scale_inv", lambda t: t[:1, :1].repeat(7, 1), "a scale has shape"),
        ("gptq", "g_idx", lambda t: t + 100, "g_idx"),
        ("gptq", "qzeros", lambda t: t[:, :1].contiguous(), "do not go together"),
        ("compressed-tensors int4", "weight_shape", lambda t: t * 2, "weight_shape"),
        ("awq", "qweight", lambda t: t.float(), "expected int32"),
        # Packed FP4, which some FP8 checkpoints have.
        ("fp8", "weight", lambda t: t.view(torch.int8), "expected 2 dimensions of float8"),
        ("fp8", "weight", lambda t: t.float(), "expected 2 dimensions of float8"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    case: str, part: str, change: Callable[[Tensor], Tensor], words_of_it: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    quantised(tmp_path, *CASES[case])
    for file in tmp_path.glob("*.safetensors"):
        stored = load_file(file)
        name = f"model.layers.0.self_attn.q_proj.{part}"
        if name in stored:
            save_file({**stored, name: change(stored[name])}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"layers\.0\.self_attn\.q_proj\.weight.*{words_of_it}"):
        load_model(tmp_path)
