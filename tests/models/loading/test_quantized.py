"""Checkpoints with quantised weights: what is loaded is what the format's own arithmetic gives."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.errors import CheckpointError
from baton.models.loading.filling import watch_tensors, weight_table
from baton.models.loading.loader import load_model
from baton.models.loading.schemes import scheme_of
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


def whole(scale: str) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        small = weight.to(torch.float8_e4m3fn)
        return {"weight": small, scale: torch.tensor(2.0), "activation_scale": torch.tensor(3.0)}, small.float() * 2

    return quantise


def words(numbers: Tensor, dim: int, bits: int = 4) -> Tensor:
    """Numbers packed along `dim`, lowest bits first, in int32."""
    each = 32 // bits
    parts = numbers.long().unflatten(dim, (-1, each))
    shifts = (torch.arange(each) * bits).view([each if i == dim + 1 else 1 for i in range(3)])
    packed = (parts << shifts).sum(dim + 1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def groups_of(size: int, group: int = GROUP) -> Tensor:
    """The group of each input. The last may be smaller."""
    return torch.arange(size) // group


def grouped(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0..15 [out, in], zeros [out, groups], scales [out, groups]."""
    index = groups_of(weight.shape[1], group)
    parts = [weight[:, index == one] for one in range(int(index[-1]) + 1)]
    scale = torch.stack([(part.amax(-1) - part.amin(-1)) / 14 for part in parts], dim=1)
    zeros = (-torch.stack([part.amin(-1) for part in parts], dim=1) / scale).round().clamp(1, 15)
    numbers = (weight / scale[:, index] + zeros[:, index]).round().clamp(0, 15)
    return numbers, zeros, scale


def value(numbers: Tensor, zeros: Tensor | int, scale: Tensor, group: int = GROUP) -> Tensor:
    index = groups_of(numbers.shape[1], group)
    wide = zeros if isinstance(zeros, int) else zeros[:, index]
    return (numbers - wide) * scale[:, index]


def int8_in_groups(weight: Tensor) -> tuple[Parts, Tensor]:
    numbers, zeros, scale = grouped(weight)
    parts = {"weight": numbers.to(torch.int8), "weight_scale": scale, "weight_zero_point": zeros.to(torch.int8)}
    return parts, value(numbers, zeros, scale)


def without_order(weight: Tensor) -> tuple[Parts, Tensor]:
    parts, expected = packed(GROUP)(weight)
    return {**parts, "weight_g_idx": torch.full(weight.shape[1:], -1, dtype=torch.int32)}, expected


def packed(group: int, has_zeros: bool = False, has_order: bool = False) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        numbers, zeros, scale = grouped(weight, group)
        wide = value(numbers, zeros if has_zeros else 8, scale, group)
        order = torch.randperm(weight.shape[1]) if has_order else torch.arange(weight.shape[1])
        parts = {
            "weight_packed": words(numbers[:, order], 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            parts["weight_zero_point"] = words(zeros, 0)
        if has_order:
            parts["weight_g_idx"] = groups_of(weight.shape[1], group)[order].int()
        return parts, wide[:, order]

    return quantise


def gptq(offset: int) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        numbers, zeros, scale = grouped(weight)
        # Inputs in groups in another order ("desc_act").
        order = torch.randperm(weight.shape[1])
        index = groups_of(weight.shape[1])[order]
        parts = {"qweight": words(numbers[:, order].T.contiguous(), 0), "g_idx": index.int(), "scales": scale.T}
        return {**parts, "qzeros": words((zeros - offset).T.contiguous(), 1)}, value(numbers, zeros, scale)[:, order]

    return quantise


def awq(weight: Tensor, is_symmetric: bool = False) -> tuple[Parts, Tensor]:
    numbers, zeros, scale = grouped(weight)
    zeros = torch.full_like(zeros, 8) if is_symmetric else zeros
    # The first word holds columns 0, 2, 4, 6, 1, 3, 5, 7.
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def shuffled(part: Tensor) -> Tensor:
        return words(part.T.unflatten(1, (-1, 8))[..., order].flatten(1), 1)

    return {"qweight": shuffled(numbers), "qzeros": shuffled(zeros), "scales": scale.T}, value(numbers, zeros, scale)


def group(bits: int, form: str, **weights: Any) -> dict[str, Any]:
    entry = {"weights": {"num_bits": bits, **weights}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": entry}}


def packed_config(size: int = GROUP, **weights: Any) -> dict[str, Any]:
    return group(4, "pack-quantized", **{"strategy": "group", "group_size": size, **weights})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": None}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
CASES: dict[str, tuple[dict[str, Any], Quantise]] = {
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [24, 40]}, blocks),
    "fp8": ({"quant_method": "fp8"}, whole("weight_scale")),
    # As transformers writes it, for example in Mistral's checkpoints.
    "fp8 of transformers": ({"quant_method": "fp8", "weight_block_size": None}, whole("weight_scale_inv")),
    "compressed-tensors fp8": (
        group(8, "float-quantized", type="float", strategy="channel"),
        channels(torch.float8_e4m3fn),
    ),
    "compressed-tensors int8": (group(8, "int-quantized", group_size=-1), channels(torch.int8)),
    "compressed-tensors int8 in groups": (
        group(8, "int-quantized", group_size=GROUP, symmetric=False),
        int8_in_groups,
    ),
    "compressed-tensors int4": (packed_config(), packed(GROUP)),
    "compressed-tensors int4 with zeros": (packed_config(symmetric=False), packed(GROUP, has_zeros=True)),
    "compressed-tensors int4 in another order": (packed_config(actorder="group"), packed(GROUP, has_order=True)),
    "compressed-tensors int4, order never set": (packed_config(actorder="group"), without_order),
    # Groups that divide neither 64 nor 176 inputs.
    "compressed-tensors int4, odd groups": (packed_config(48, symmetric=False), packed(48, has_zeros=True)),
    "gptq": (GPTQ, gptq(1)),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(0)),
    "awq": ({**AWQ, "version": "GEMM"}, awq),
    # As AutoRound writes it: zero points are stored nevertheless.
    "awq, symmetric": ({**AWQ, "version": None, "zero_point": False}, partial(awq, is_symmetric=True)),
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
    scheme = scheme_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, ())
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
        # Rotations that are computed beside the weights, and weights that are packed by their zeros.
        ({**packed_config(), "transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}, "transform_config"),
        ({**packed_config(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (packed_config(type="float"), "type': 'float'"),
        (packed_config(strategy="tensor"), "channels or groups"),
        (packed_config(strategy="tensor_group"), "strategy 'tensor_group'"),
        (group(8, "int-quantized", type="float"), "type 'float'"),
        (group(8, "int-quantized", group_size=GROUP, actorder="group"), "actorder 'group'"),
    ],
)
def test_other_formats_are_refused_by_name(config: Any, words_of_it: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    edit(tmp_path, config)
    with pytest.raises(CheckpointError, match=words_of_it):
        load_model(tmp_path)


def test_what_headers_show_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    quantised(tmp_path, *CASES["gptq"])
    name, told = "model.layers.1.self_attn.q_proj.scales", list[tuple[int, int]]()
    for file in tmp_path.glob("*.safetensors"):
        if name in (stored := load_file(file)):
            save_file({**stored, name: stored[name][:-1].contiguous()}, file, {"format": "pt"})
    words_of_it = r"layers\.1\.self_attn\.q_proj\.weight, quantised by gptq: scales"
    with (
        watch_tensors(lambda read, total: told.append((read, total))),
        pytest.raises(CheckpointError, match=words_of_it),
    ):
        load_model(tmp_path)
    assert told == []


@pytest.mark.usefixtures("unpacked")
def test_biases_of_zeros_beside_gptq_weights_are_left_out(tmp_path: Path) -> None:
    """Old versions of its tools write them for layers without a bias."""
    make_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    quantised(tmp_path, *CASES["gptq"])
    file, name = tmp_path / "model-00001-of-00002.safetensors", "model.layers.0.self_attn.q_proj.bias"
    stored = load_file(file)
    save_file({**stored, name: torch.zeros(64)}, file, {"format": "pt"})
    assert "model.layers.0.self_attn.q_proj.weight" in weight_table(load_model(tmp_path))
    save_file({**stored, name: torch.eye(64)[5]}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"unexpected tensor {name}"):
        load_model(tmp_path)


@pytest.mark.usefixtures("unpacked")
def test_a_quantised_head_is_used_though_the_config_ties_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1, vocab_size=264, tie_word_embeddings=True)
    edit(tmp_path, GPTQ)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    parts, expected = gptq(1)(torch.randn(264, 64))
    head = {f"lm_head.{part}": values.contiguous() for part, values in parts.items()}
    save_file({**stored, **head}, file, {"format": "pt"})
    torch.testing.assert_close(load_model(tmp_path).lm_head.weight, expected, rtol=1e-5, atol=1e-6)
