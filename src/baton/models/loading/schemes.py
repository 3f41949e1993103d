"""Dequantised weights: computation is in full precision.

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
from baton.models.loading.quantization import Quantization, ScaleBlock, quantization_of
from baton.models.loading.unpacking import unpack_awq, unpack_columns, unpack_rows

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Parts = Mapping[str, Tensor]


class Scheme(Protocol):
    """The `needed` and `optional` tensors of a weight. `mark`: one that only quantised weights have. `early`: `shape`
    needs their values."""

    name: str
    mark: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    early: tuple[str, ...]

    def shape(self, parts: Parts) -> torch.Size:
        """[out, in], by dtypes and shapes. Raises `CheckpointError` if the parts do not go together."""
        ...

    def dequantise(self, parts: Parts) -> Tensor:
        """[out, in] in float32. Raises `CheckpointError` for impossible values."""
        ...


class ScaledWeight:
    """`weight` [out, in] in FP8 or INT8, times a scale for each block. `weight_scale_inv` is a factor too."""

    early: tuple[str, ...] = ()

    def __init__(self, found: Quantization, names: Collection[str]) -> None:
        is_inverse = found.method == "fp8" and (
            found.block is not None or any(name.endswith(".weight_scale_inv") for name in names)
        )
        self.name, self._block = found.method, found.block
        self.mark = self._scale = "weight_scale_inv" if is_inverse else "weight_scale"
        self._dtypes = _FLOAT8 if found.numbers == "float" else (torch.int8,)
        self.needed: tuple[str, ...] = ("weight", self._scale, *(("weight_zero_point",) if found.has_zeros else ()))
        self.optional: tuple[str, ...] = () if found.has_zeros else ("weight_zero_point",)

    def shape(self, parts: Parts) -> torch.Size:
        weight = parts["weight"]
        if weight.dtype not in self._dtypes or weight.dim() != 2:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
            raise CheckpointError(f"weight is {weight.dtype} {list(weight.shape)}, expected 2 dimensions of {wanted}")
        blocks = [self._block] if self._block is not None else [(None, None), (1, None)]
        possible = [_num_blocks(weight.shape, block) for block in blocks]
        for name in (self._scale, *(("weight_zero_point",) if "weight_zero_point" in parts else ())):
            if parts[name].dim() > 2 or tuple(_in_two(parts[name]).shape) not in possible:
                expected = " or ".join(str(list(shape)) for shape in possible)
                problem = f"{name} has shape {list(parts[name].shape)}, expected {expected}"
                raise CheckpointError(f"{problem} for a weight of {list(weight.shape)}")
        _check_floats(self._scale, parts[self._scale])
        return weight.shape

    def dequantise(self, parts: Parts) -> Tensor:
        wide, scale = parts["weight"].float(), _finite(self._scale, parts)
        if (zeros := parts.get("weight_zero_point")) is not None:
            wide = wide - _spread(zeros.float(), wide.shape, self._block)
        wide = wide * _spread(scale, wide.shape, self._block)
        if not bool(wide.sum().isfinite()):
            raise CheckpointError("weight has values that are no numbers")
        return wide


class PackedWeight:
    """compressed-tensors' `weight_packed`: int32 words [out, in / (32 / bits)], lowest bits first, offset by half the
    range, with a scale for each group of inputs."""

    name = "compressed-tensors"
    mark = "weight_packed"
    early: tuple[str, ...] = ("weight_shape",)

    def __init__(self, found: Quantization, names: Collection[str]) -> None:
        assert found.block is not None
        self._bits, self._groups = found.bits, _Groups(found, "weight_g_idx")
        has = {"weight_zero_point": found.has_zeros, "weight_g_idx": not found.is_ordered}
        self.needed: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_shape", *(n for n in has if has[n]))
        self.optional: tuple[str, ...] = tuple(n for n in has if not has[n])

    def shape(self, parts: Parts) -> torch.Size:
        stated, each = parts["weight_shape"], 32 // self._bits
        if stated.shape != (2,) or stated.is_floating_point():
            raise CheckpointError(f"weight_shape is {stated.dtype} {list(stated.shape)}, expected two integers")
        out, size = shape = torch.Size(stated.tolist())
        groups = self._groups.count(size)
        _check(parts, "weight_packed", (out, -(-size // each)), torch.int32)
        _check(parts, "weight_scale", (out, groups))
        _check(parts, "weight_zero_point", (-(-out // each), groups), torch.int32)
        self._groups.check(parts, size)
        return shape

    def dequantise(self, parts: Parts) -> Tensor:
        out, size = parts["weight_shape"].tolist()
        index, middle = self._groups.index(parts, size), 1 << (self._bits - 1)
        scale = _finite("weight_scale", parts)
        wide = unpack_columns(parts["weight_packed"], self._bits)[:, :size].float() - middle
        if (zeros := parts.get("weight_zero_point")) is not None:
            # Packed along the outputs.
            wide = wide - (unpack_rows(zeros, self._bits)[:out].float() - middle)[:, index]
        return wide * scale[:, index]


class GroupedWeight:
    """`scales` [groups, out]. GPTQ: `qweight` int32 [in / (32 / bits), out], `qzeros` int32
    [groups, out / (32 / bits)], each input's group in `g_idx`; the first version stores zeros less one. AWQ, in 4 bits:
    `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8]."""

    mark = "qweight"
    early: tuple[str, ...] = ()

    def __init__(self, found: Quantization, names: Collection[str]) -> None:
        self.name, self._bits = found.method, found.bits
        # GPTQ's tools convert whole words.
        self._zero_offset = sum(found.zero_offset << shift for shift in range(0, 32, found.bits))
        self._is_gptq, self._groups = found.form == "gptq", _Groups(found, "g_idx")
        self._is_symmetric = found.is_symmetric
        index = () if found.is_ordered else ("g_idx",)
        self.needed: tuple[str, ...] = ("qweight", "qzeros", "scales", *index)
        self.optional: tuple[str, ...] = ("g_idx",) if self._is_gptq and found.is_ordered else ()

    def shape(self, parts: Parts) -> torch.Size:
        words, each = parts["qweight"], 32 // self._bits
        if words.dtype is not torch.int32 or words.dim() != 2:
            raise CheckpointError(f"qweight is {words.dtype} {list(words.shape)}, expected int32 of 2 dimensions")
        rows, columns = words.shape
        size, out = (rows * each, columns) if self._is_gptq else (rows, columns * each)
        groups = self._groups.count(size)
        _check(parts, "scales", (groups, out))
        _check(parts, "qzeros", (groups, -(-out // each)), torch.int32)
        self._groups.check(parts, size)
        return torch.Size((out, size))

    def dequantise(self, parts: Parts) -> Tensor:
        scales, bits, packed = _finite("scales", parts), self._bits, parts["qzeros"] + self._zero_offset
        if self._is_gptq:
            values, zeros = unpack_rows(parts["qweight"], bits), unpack_columns(packed, bits)
        else:
            values, zeros = unpack_awq(parts["qweight"]), unpack_awq(packed)
        zeros = zeros[:, : scales.shape[1]]
        if self._is_symmetric and bool((zeros != 1 << (bits - 1)).any()):
            raise CheckpointError("qzeros are not the middle of the range, though config.json says symmetric")
        index = self._groups.index(parts, len(values))
        return ((values - zeros[index]).float() * scales[index]).T.contiguous()


class _Groups:
    """Which inputs share a scale. `part`: the tensor with each input's group."""

    def __init__(self, found: Quantization, part: str) -> None:
        assert found.block is not None
        self._size, self._is_ordered, self._part = found.block[1], found.is_ordered, part

    def count(self, size: int) -> int:
        """The last group may be smaller."""
        return 1 if self._size is None else -(-size // self._size)

    def check(self, parts: Parts, size: int) -> None:
        index = parts.get(self._part)
        if index is not None and (index.shape != (size,) or index.is_floating_point()):
            what = f"{self._part} is {index.dtype} {list(index.shape)}"
            raise CheckpointError(f"{what}, expected integers for {size} inputs")

    def index(self, parts: Parts, size: int) -> Tensor:
        """Int64 [in]. Raises `CheckpointError` for groups of other sizes, or in an order that the config denies."""
        ordered = torch.arange(size) // (self._size or size)
        if (given := parts.get(self._part)) is None:
            return ordered
        index, count = given.long(), self.count(size)
        if self._part == "weight_g_idx" and bool((index == -1).all()):
            return ordered
        if bool((index < 0).any()) or bool((index >= count).any()):
            raise CheckpointError(f"{self._part} does not give the {size} inputs one of {count} groups each")
        if int(torch.bincount(index).max()) > (self._size or size):
            raise CheckpointError(f"{self._part} has groups of more than {self._size} inputs")
        if self._is_ordered and not torch.equal(index, ordered):
            raise CheckpointError(f"{self._part} is in another order than that of the inputs, which config.json denies")
        return index


def _check(parts: Parts, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None) -> None:
    """`dtype` None: floats."""
    part = parts.get(name)
    if part is None:
        return
    if tuple(part.shape) != shape or dtype not in (None, part.dtype):
        kind = "floats" if dtype is None else str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} is {part.dtype} {list(part.shape)}, expected {kind} {list(shape)}")
    if dtype is None:
        _check_floats(name, part)


def _check_floats(name: str, part: Tensor) -> None:
    if not part.is_floating_point():
        raise CheckpointError(f"{name} is {part.dtype}, expected floats")


def _finite(name: str, parts: Parts) -> Tensor:
    """In float32."""
    wide = parts[name].float()
    if not bool(wide.isfinite().all()):
        raise CheckpointError(f"{name} has values that are no numbers")
    return wide


def _num_blocks(shape: torch.Size, block: ScaleBlock) -> tuple[int, int]:
    rows, columns = (1 if size is None else -(-shape[dim] // size) for dim, size in enumerate(block))
    return rows, columns


def _in_two(part: Tensor) -> Tensor:
    return part if part.dim() >= 2 else part.reshape(-1, 1)


def _spread(part: Tensor, shape: torch.Size, block: ScaleBlock | None) -> Tensor:
    """A number for each block, repeated to broadcast over a weight."""
    part, (rows, columns) = _in_two(part), block or (None, None)
    if rows is not None and rows > 1:
        part = part.repeat_interleave(rows, 0)[: shape[0]]
    return part if columns is None else part.repeat_interleave(columns, 1)[:, : shape[1]]


def scheme_of(raw: RawConfig, names: Collection[str]) -> Scheme | None:
    """None for unquantised weights. `names`: all stored. Raises `CheckpointError` naming what is unsupported."""
    quantization = quantization_of(raw)
    return None if quantization is None else _SCHEMES[quantization.form](quantization, names)


_SCHEMES: dict[str, Callable[[Quantization, Collection[str]], Scheme]] = {
    "scaled": ScaledWeight,
    "packed": PackedWeight,
    "gptq": GroupedWeight,
    "awq": GroupedWeight,
}
