"""Quantised weights whose parts are slightly wrong: none is taken for another weight in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import CheckpointError
from baton.models.loading.quantized import QuantizedWeights
from baton.models.loading.schemes import scheme_of
from tests.models.loading.test_quantized import CASES, words

Change = Callable[[Tensor], Tensor]
# Square, so that other orders of its sizes do not show.
SHAPE = (64, 64)


def joined(config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor | None:
    """The weight of these parts; None if they are not all of one."""
    names = [f"layer.{part}" for part in parts]
    scheme = scheme_of({"quantization_config": config}, names)
    assert scheme is not None
    weights, made = QuantizedWeights(scheme, names), None
    for part, values in parts.items():
        if weights.name(f"layer.{part}") == "layer.weight":
            made = weights.add(f"layer.{part}", values)
    return made


def edited(config: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """With other fields; those of compressed-tensors are of its group's weights."""
    config = copy.deepcopy(config)
    groups = config.get("config_groups")
    (groups["group_0"]["weights"] if groups else config).update(fields)
    return config


def outlines(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they are known from a file's header."""
    return {name: part if name == "weight_shape" else part.to("meta") for name, part in parts.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_shape_of_a_weight_is_known_from_the_header(case: str) -> None:
    config, quantise = CASES[case]
    parts, expected = quantise(torch.randn(48, 80))
    found, outlined = joined(config, parts), joined(config, outlines(parts))
    assert found is not None
    assert outlined is not None
    assert outlined.is_meta
    assert found.shape == outlined.shape == expected.shape


BLOCKS, FP8, TENSOR = "fp8 in blocks", "compressed-tensors fp8", "fp8"
INT8, INT8_GROUPS = "compressed-tensors int8", "compressed-tensors int8 in groups"
INT4, ZEROS, ORDER = (f"compressed-tensors int4{more}" for more in ("", " with zeros", " in another order"))
# Each: case, fields of the config, part, change (None: it is missing), words of the refusal.
Fault = tuple[str, dict[str, Any], str, Change | None, str]
BY_HEADER: list[Fault] = [
    (BLOCKS, {}, "weight_scale_inv", lambda t: t[:1, :1], r"weight_scale_inv has shape \[1, 1\]"),
    (BLOCKS, {}, "weight_scale_inv", lambda t: t.T, r"has shape \[2, 3\], expected \[3, 2\]"),
    (BLOCKS, {}, "weight_scale_inv", lambda t: t.repeat(7, 1), "has shape"),
    # Exponents alone, as bytes.
    (BLOCKS, {}, "weight_scale_inv", lambda t: t.to(torch.uint8), "uint8, expected floats"),
    (BLOCKS, {}, "weight", None, "weight is missing"),
    (BLOCKS, {}, "weight", lambda t: t.float(), "expected 2 dimensions of float8"),
    # Packed FP4, which some FP8 checkpoints have.
    (TENSOR, {}, "weight", lambda t: t.view(torch.int8), "expected 2 dimensions of float8"),
    (TENSOR, {}, "weight_scale", lambda t: t.repeat(2), r"expected \[1, 1\] or \[64, 1\]"),
    (FP8, {}, "weight_scale", lambda t: t[:1], r"expected \[64, 1\]"),
    (FP8, {}, "weight_scale", lambda t: t.T, r"expected \[64, 1\]"),
    (FP8, {"strategy": "tensor"}, "weight_scale", lambda t: t, r"expected \[1, 1\]"),
    (FP8, {}, "weight", lambda t: t.view(torch.int8), "expected 2 dimensions of float8"),
    (INT8, {"symmetric": False}, "weight", lambda t: t, "weight_zero_point is missing"),
    (INT8_GROUPS, {}, "weight_zero_point", lambda t: t[:, :1], "weight_zero_point has shape"),
    (INT8_GROUPS, {"group_size": 32}, "weight", lambda t: t, r"weight_scale has shape \[64, 4\]"),
    # In 8 bits, read as in 4.
    (INT4, {}, "weight_packed", lambda t: t.repeat(1, 2), r"weight_packed is .* expected int32 \[64, 8\]"),
    (INT4, {}, "weight_packed", lambda t: t.float(), "expected int32"),
    (INT4, {}, "weight_shape", None, "weight_shape is missing"),
    (INT4, {}, "weight_shape", lambda t: t * 2, "weight_packed is"),
    (INT4, {}, "weight_shape", lambda t: t.float(), "expected two integers"),
    (INT4, {}, "weight_scale", None, "weight_scale is missing"),
    (INT4, {}, "weight_scale", lambda t: t[:, :2], "weight_scale is"),
    (INT4, {}, "weight_scale", lambda t: t.int(), "expected floats"),
    (INT4, {"group_size": 8}, "weight_scale", lambda t: t, r"weight_scale is .* expected floats \[64, 8\]"),
    (INT4, {"symmetric": False}, "weight_scale", lambda t: t, "weight_zero_point is missing"),
    (INT4, {"actorder": True}, "weight_scale", lambda t: t, "weight_g_idx is missing"),
    (ZEROS, {}, "weight_zero_point", lambda t: t.repeat(2, 1), "weight_zero_point is"),
    (ORDER, {}, "weight_g_idx", lambda t: t[:-1], "integers for 64 inputs"),
    *(
        (kind, fields, part, change, words)
        for kind in ("gptq", "awq")
        for fields, part, change, words in (
            ({}, "scales", None, "scales is missing"),
            ({}, "qzeros", None, "qzeros is missing"),
            ({}, "scales", lambda t: t.T.int().T, "scales is .* expected floats"),
            ({}, "scales", lambda t: t[:1], "scales is"),
            ({}, "qzeros", lambda t: t[:, :1], "qzeros is"),
            ({"group_size": 32}, "scales", lambda t: t, r"expected floats \[2, 64\]"),
            ({"group_size": -1}, "scales", lambda t: t, r"expected floats \[1, 64\]"),
            ({}, "qweight", lambda t: t.float(), "expected int32"),
        )
    ),
    ("gptq", {"bits": 8}, "scales", lambda t: t, "scales is"),
    ("gptq", {}, "g_idx", None, "g_idx is missing"),
    ("gptq", {}, "g_idx", lambda t: t.float(), "expected integers"),
]


def not_a_number(part: Tensor) -> Tensor:
    wide = part.contiguous().clone()
    if wide.dtype == torch.float8_e4m3fn:
        wide.view(torch.int8)[-1, -1] = 127
    else:
        wide[-1, -1] = torch.inf
    return wide


BY_VALUE: list[Fault] = [
    (BLOCKS, {}, "weight", not_a_number, "no numbers"),
    (BLOCKS, {}, "weight_scale_inv", not_a_number, "no numbers"),
    (INT8, {}, "weight_scale", not_a_number, "no numbers"),
    (INT4, {}, "weight_scale", not_a_number, "no numbers"),
    ("awq", {}, "scales", not_a_number, "no numbers"),
    ("gptq", {}, "g_idx", lambda t: t + 100, "one of 4 groups"),
    ("gptq", {}, "g_idx", lambda t: -t, "one of 4 groups"),
    ("gptq", {}, "g_idx", torch.zeros_like, "more than 16 inputs"),
    ("gptq", {"desc_act": False}, "g_idx", lambda t: t, "another order"),
    ("gptq", {"sym": True}, "qzeros", lambda t: t, "qzeros are not the middle"),
    ("awq", {"zero_point": False}, "qzeros", lambda t: t, "qzeros are not the middle"),
    # Seven is stored for eight in the first version alone.
    ("gptq v2", {"sym": True}, "qzeros", lambda t: torch.full_like(t, 0x77777777), "qzeros are not the middle"),
    (ORDER, {"actorder": None}, "weight_g_idx", lambda t: t, "another order"),
    (ORDER, {}, "weight_g_idx", lambda t: torch.cat([t[:-1], -t[:1] - 1]), "one of 4 groups"),
]


def faulty(fault: Fault) -> tuple[dict[str, Any], dict[str, Tensor]]:
    case, fields, part, change, _ = fault
    config, quantise = CASES[case]
    torch.manual_seed(0)
    parts = quantise(torch.randn(SHAPE))[0]
    if change is None:
        del parts[part]
    else:
        parts[part] = change(parts[part])
    return edited(config, fields), parts


def refused(config: Mapping[str, Any], parts: Mapping[str, Tensor], words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^tensor layer\.weight, quantised by .*{words}"):
        joined(config, parts)


def named(faults: list[Fault]) -> list[str]:
    return [f"{case}, {part}: {words}" for case, _, part, _, words in faults]


@pytest.mark.parametrize("fault", BY_HEADER, ids=named(BY_HEADER))
def test_faults_that_a_header_shows_are_named(fault: Fault) -> None:
    config, parts = faulty(fault)
    refused(config, outlines(parts), fault[-1])
    refused(config, parts, fault[-1])


@pytest.mark.parametrize("fault", BY_VALUE, ids=named(BY_VALUE))
def test_impossible_values_are_named(fault: Fault) -> None:
    config, parts = faulty(fault)
    assert joined(config, outlines(parts)) is not None
    refused(config, parts, fault[-1])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_zero_point_of_gptq_that_is_zero_borrows_from_the_next(bits: int) -> None:
    """AutoGPTQ and GPTQModel convert whole words: `qzeros -= 0b0001...0001`."""
    each = 32 // bits
    numbers = torch.randint(0, 1 << bits, (4, 64)).where(torch.rand(4, 64) < 0.7, torch.tensor(0))
    parts = {"qweight": torch.randint(-(1 << 31), 1 << 31, (64 // each, 64)).int(), "scales": torch.rand(4, 64) + 0.5}
    config = {"quant_method": "gptq", "bits": bits, "group_size": 16}
    packed, ones = words(numbers, 1, bits), words(torch.ones(1, each), 1, bits)
    second = joined({**config, "checkpoint_format": "gptq_v2"}, {**parts, "qzeros": packed})
    first = joined(config, {**parts, "qzeros": packed - ones})
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_symmetric_weights_of_gptq_are_read() -> None:
    config, quantise = CASES["gptq"]
    parts, _ = quantise(torch.randn(SHAPE))
    made = joined({**config, "sym": True}, {**parts, "qzeros": torch.full_like(parts["qzeros"], 0x77777777)})
    assert made is not None
    values = made / parts["scales"][parts["g_idx"].long()].T
    assert -8 <= float(values.min().round()) <= float(values.max().round()) <= 7
