"""Tiles of Intel AMX: registers of up to 16 rows of 64 bytes."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable, Mapping
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS
from baton.kernels.cpu.simd import LANES, cgutils, has_features, i64, load_widened

HAS_TILES = HAS_BF16_PAIRS and has_features("amx-tile", "amx-bf16")
# Rows, bytes of a row, bfloat16 columns and pairs of them.
TILE_ROWS, TILE_BYTES, TILE_COLUMNS, TILE_PAIRS = 16, 64, 32, 16
# Sums or what is multiplied, with as many rows as `begin_tiles` gets, and what it is multiplied by.
LEFTS, RIGHTS = range(6), (6, 7)
# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_I8, _I64 = ir.IntType(8), ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


@functools.cache
def may_use_tiles() -> bool:
    """Asks Linux for the permission."""
    if not HAS_TILES or platform.system() != "Linux":
        return False
    numbers = (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return bool(ctypes.CDLL(None).syscall(*map(ctypes.c_long, numbers)) == 0)


def configure(builder: Any, heights: Mapping[int, Any], row_bytes: Mapping[int, int] | None = None) -> None:
    """Rows of the tiles that are used, and their bytes (64). `end_tiles` ends their use."""
    config = cgutils.alloca_once(builder, ir.ArrayType(_I64, 8))
    config.align = TILE_BYTES
    widths, rows = [0, 0], ir.Constant(_I64, 0)
    for tile, height in heights.items():
        widths[tile // 4] |= (row_bytes or {}).get(tile, TILE_BYTES) << (16 * (tile % 4))
        rows = builder.or_(rows, builder.shl(height, ir.Constant(_I64, 8 * tile)))
    for place, word in enumerate((1, 0, *widths, 0, 0, rows, 0)):
        to = builder.gep(config, [ir.Constant(_I64, 0), ir.Constant(_I64, place)])
        builder.store(ir.Constant(_I64, word) if isinstance(word, int) else word, to)
    _call(builder, "ldtilecfg", builder.bitcast(config, _I8.as_pointer()))


def stack_space(builder: Any, num_bytes: int) -> Any:
    """The address of whole cache lines."""
    space = cgutils.alloca_once(builder, ir.ArrayType(_I64, num_bytes // 8))
    space.align = TILE_BYTES
    return builder.ptrtoint(space, _I64)


def biases(builder: Any, at: Any, chunks: int) -> list[Any]:
    """16 of each chunk, of bfloat16 at address `at`. For 0 they are -0, so that a sum of -0 stays as it is."""
    found = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [-0.0] * LANES)) for _ in range(chunks)]
    with builder.if_then(builder.icmp_signed("!=", at, i64(0))):
        for chunk, to in enumerate(found):
            builder.store(load_widened(builder, builder.add(at, i64(2 * LANES * chunk)), 2), to)
    return [builder.load(vector) for vector in found]


def zero(builder: Any, tile: int) -> None:
    _call(builder, "tilezero", ir.Constant(_I8, tile))


def load_tile(builder: Any, tile: int, at: Any, stride: Any, passes_by: bool = False) -> None:
    """`passes_by`: it should not push other data out of the first cache."""
    name = "tileloaddt164" if passes_by else "tileloadd64"
    _call(builder, name, ir.Constant(_I8, tile), builder.inttoptr(at, _I8.as_pointer()), stride)


def store_tile(builder: Any, tile: int, at: Any, stride: Any) -> None:
    _call(builder, "tilestored64", ir.Constant(_I8, tile), builder.inttoptr(at, _I8.as_pointer()), stride)


def add_product(builder: Any, total: int, left: int, right: int) -> None:
    """total [row, n] += left [row, pair, 2] * right [pair, n, 2], of bfloat16, in float32."""
    _call(builder, "tdpbf16ps", *[ir.Constant(_I8, tile) for tile in (total, left, right)])


def add_byte_product(builder: Any, total: int, left: int, right: int) -> None:
    """total [row, n] += left [row, four, 4] * right [four, n, 4], of signed and unsigned bytes, in int32."""
    _call(builder, "tdpbsud", *[ir.Constant(_I8, tile) for tile in (total, left, right)])


def _call(builder: Any, name: str, *args: Any) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), args)


def _begun(typing_context: Any, num_rows: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        configure(builder, dict.fromkeys(LEFTS, args[0]) | dict.fromkeys(RIGHTS, ir.Constant(_I64, TILE_PAIRS)))
        return context.get_dummy_value()

    return numba.void(numba.int64), generate


def _ended(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return numba.void(), generate


begin_tiles = cast(Callable[[int], None], intrinsic(_begun))
end_tiles = cast(Callable[[], None], intrinsic(_ended))
