"""Quantised weights of checkpoints, dequantised while they are loaded: computation is in full precision.

Formats: block-wise FP8 (DeepSeek-V3, arXiv:2412.19437, 3.3), compressed-tensors (FP8, INT8 and packed INT4), GPTQ
(arXiv:2210.17323) and AWQ (arXiv:2306.00978). A config's quantisation of activations is not applied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from baton.errors import CheckpointError
from baton.models.config import RawConfig
from baton.models.loading.quantization import Quantization, quantization_of
from baton.models.loading.unpacking import unpack_awq, unpack_columns, unpack_rows

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# They change no weight.
_IGNORED = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_zero_point", "input_global_scale")


class Scheme(Protocol):
    """How one weight is stored: `needed` tensors, which replace `weight`, and `optional` ones."""

    name: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        """[out, in] in float32. Raises `CheckpointError`."""
        ...


class ScaledWeight:
    """`weight` [out, in] in FP8 or INT8, times a scale for each tensor, output channel, or block of `block` outputs and
    inputs. `weight_scale_inv` of FP8 in blocks is a factor too, despite its name.
    """

    optional: tuple[str, ...] = ("weight_zero_point",)

    def __init__(self, name: str, scale: str, block: tuple[int, int] | None, dtypes: Collection[torch.dtype]) -> None:
        self.name, self._scale, self._block, self._dtypes = name, scale, block, dtypes
        self.needed: tuple[str, ...] = ("weight", scale)

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        weight, scale = parts["weight"], parts[self._scale].float()
        if weight.dtype not in self._dtypes or weight.dim() != 2:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
            raise CheckpointError(f"weight is {weight.dtype} {list(weight.shape)}, expected 2 dimensions of {wanted}")
        zeros = parts.get("weight_zero_point")
        wide = weight.float() if zeros is None else weight.float() - _spread(zeros.float(), weight.shape, self._block)
        return wide * _spread(scale, weight.shape, self._block)


class PackedWeight:
    """compressed-tensors' `weight_packed`: int32 words [out, in / (32 / bits)], lowest bits first, offset by half the
    range, with a scale for each group of inputs."""

    name = "compressed-tensors"
    needed: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_shape")
    optional: tuple[str, ...] = ("weight_zero_point", "weight_g_idx")

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        shape = torch.Size(parts["weight_shape"].tolist())
        values = unpack_columns(parts["weight_packed"], self._bits)
        if len(shape) != 2 or values.shape[0] != shape[0] or values.shape[1] < shape[1]:
            raise CheckpointError(f"weight_packed does not hold the {list(shape)} of weight_shape")
        middle, scale = 1 << (self._bits - 1), parts["weight_scale"].float()
        wide = values[:, : shape[1]].float() - middle
        groups = parts.get("weight_g_idx")
        if (zeros := parts.get("weight_zero_point")) is not None:
            # Packed along the outputs.
            zeros = unpack_rows(zeros, self._bits)[: shape[0]].float() - middle
            wide = wide - _by_group(zeros, groups, shape)
        return wide * _by_group(scale, groups, shape)


class Gptq:
    """`qweight` int32 [in / (32 / bits), out], `qzeros` int32 [groups, out / (32 / bits)], `scales` [groups, out], and
    the group of each input in `g_idx`. `zero_offset` 1: zeros are stored less one, as in the first version."""

    name = "gptq"
    needed: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ("g_idx",)

    def __init__(self, bits: int, zero_offset: int) -> None:
        self._bits, self._zero_offset = bits, zero_offset

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        values, scales = unpack_rows(parts["qweight"], self._bits), parts["scales"].float()
        zeros = unpack_columns(parts["qzeros"], self._bits) + self._zero_offset
        return _of_groups(values, zeros, scales, parts.get("g_idx"))


class Awq:
    """`qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out], in 4 bits."""

    name = "awq"
    needed: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ()

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        zeros = unpack_awq(parts["qzeros"])
        return _of_groups(unpack_awq(parts["qweight"]), zeros, parts["scales"].float(), None)


def _of_groups(values: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None) -> Tensor:
    """(values - zeros) * scales, transposed: values [in, out], zeros and scales [groups, out]."""
    size = values.shape[0]
    if values.shape[1] != scales.shape[1] or zeros.shape != scales.shape:
        shapes = f"{list(values.shape)}, qzeros {list(zeros.shape)} and scales {list(scales.shape)}"
        raise CheckpointError(f"qweight {shapes} do not go together")
    index = _group_index(groups, size, len(scales))
    return ((values - zeros[index]).float() * scales[index]).T.contiguous()


def _by_group(part: Tensor, groups: Tensor | None, shape: torch.Size) -> Tensor:
    """A scale or zero [out, groups] for each number of a weight [out, in]."""
    if part.dim() != 2 or part.shape[0] != shape[0]:
        raise CheckpointError(f"a scale has shape {list(part.shape)}, the weight {list(shape)}")
    return part[:, _group_index(groups, shape[1], part.shape[1])]


def _group_index(groups: Tensor | None, size: int, count: int) -> Tensor:
    if groups is None:
        if size % count:
            raise CheckpointError(f"{size} inputs in {count} groups")
        return torch.arange(size) // (size // count)
    index = groups.long()
    if index.shape != (size,) or bool((index < 0).any()) or bool((index >= count).any()):
        raise CheckpointError(f"g_idx does not give the {size} inputs one of {count} groups each")
    return index


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """A scale for all, for each output [out, 1], or for each block [blocks, blocks], as wide as a weight. The last
    blocks may be smaller.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    rows, columns = (1, shape[1]) if block is None else block
    if scale.shape != (-(-shape[0] // rows), -(-shape[1] // columns)):
        raise CheckpointError(f"a scale has shape {list(scale.shape)}, the weight {list(shape)}")
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def scheme_of(raw: RawConfig) -> Scheme | None:
    """None for unquantised weights. Raises `CheckpointError`."""
    found = quantization_of(raw)
    return None if found is None else _SCHEMES[found.form](found)


_SCHEMES: dict[str, Callable[[Quantization], Scheme]] = {
    "scaled": lambda found: ScaledWeight(
        found.method,
        "weight_scale_inv" if found.method == "fp8" and found.block else "weight_scale",
        found.block,
        _FLOAT8 if found.method == "fp8" else (*_FLOAT8, torch.int8),
    ),
    "packed": lambda found: PackedWeight(found.bits),
    "gptq": lambda found: Gptq(found.bits, found.zero_offset),
    "awq": lambda found: Awq(),
}


class QuantizedWeights:
    """Joins the parts of quantised weights, which come in any order."""

    def __init__(self, scheme: Scheme, names: Collection[str]) -> None:
        """`names`: all stored. Layers without the scheme's tensors are not quantised."""
        self.scheme = scheme.name
        self._scheme, self._names = scheme, frozenset(names)
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def name(self, stored: str) -> str | None:
        """The weight that a stored tensor belongs to, or its own name. None: ignored."""
        stem, _, part = stored.rpartition(".")
        if part in _IGNORED:
            return None
        return f"{stem}.weight" if self._is_part(stem, part) else stored

    def add(self, stored: str, tensor: Tensor) -> Tensor | None:
        """The weight after its last part; None before; other tensors unchanged."""
        stem, _, part = stored.rpartition(".")
        if not self._is_part(stem, part):
            return tensor
        parts = self._waiting.setdefault(stem, {})
        parts[part] = tensor
        if len(parts) < len(self._parts(stem)):
            return None
        del self._waiting[stem]
        try:
            return self._scheme.dequantise(parts)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {stem}.weight, quantised by {self._scheme.name}: {error}") from None

    def _is_part(self, stem: str, part: str) -> bool:
        scheme = self._scheme
        return part in (*scheme.needed, *scheme.optional) and all(
            f"{stem}.{name}" in self._names for name in scheme.needed
        )

    def _parts(self, stem: str) -> list[str]:
        every = (*self._scheme.needed, *self._scheme.optional)
        return [name for name in every if f"{stem}.{name}" in self._names]
