"""The weights of a GGUF file, dequantised one tensor at a time, with the interface of `safetensors.safe_open`."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from baton.errors import CheckpointError
from baton.models.loading.gguf_config import gguf_config
from baton.models.loading.gguf_header import GgufHeader, GgufTensor, read_header
from baton.models.loading.gguf_names import model_name

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_NAMES = {0: "F32", 1: "F16", 30: "BF16"}
# llama.cpp rotates neighbours of a head, so its Llama files interleave the two halves that are rotated here.
_INTERLEAVED = re.compile(r"\.attn_([qk])\.")


@dataclass(frozen=True, slots=True)
class GgufOutline:
    """`dtype`: safetensors' name of what is read."""

    shape: tuple[int, ...]
    dtype: str

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype


class GgufWeights:
    """Tensors by their Hugging Face names: floats as stored, others in float32. Raises `CheckpointError`."""

    def __init__(self, file: Path) -> None:
        status = os.stat(file)
        self._header, self._num_heads = _read(file, status.st_mtime_ns, status.st_size)
        self._blob = np.memmap(file, mode="r", dtype=np.uint8)
        self._stored: dict[str, tuple[str, int | None]] = {}
        for stored, tensor in self._header.tensors.items():
            name = model_name(stored)
            if name is None:
                continue  # the rope factors, which are in the config
            if "{}" in name:
                self._stored |= {name.format(expert): (stored, expert) for expert in range(tensor.shape[0])}
            else:
                self._stored[name] = stored, None

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, *error: object) -> None:
        del self._blob

    def keys(self) -> list[str]:
        return list(self._stored)

    def get_slice(self, name: str) -> GgufOutline:
        stored, expert = self._stored[name]
        tensor = self._header.tensors[stored]
        return GgufOutline(tensor.shape if expert is None else tensor.shape[1:], _NAMES.get(tensor.kind, "F32"))

    def get_tensor(self, name: str) -> Tensor:
        stored, expert = self._stored[name]
        values = self._values(self._header.tensors[stored], expert)
        part = _INTERLEAVED.search(stored)
        if part is None or not self._num_heads:
            return values
        rows, heads = len(values), self._num_heads[part[1]]
        if rows % (2 * heads):
            raise CheckpointError(f"tensor {stored} has {rows} rows for {heads} heads")
        halves = values.view(heads, rows // heads // 2, 2, *values.shape[1:]).transpose(1, 2)
        return halves.reshape(values.shape)

    def _values(self, tensor: GgufTensor, expert: int | None) -> Tensor:
        blob, shape = self._blob[tensor.start : tensor.start + tensor.num_bytes], tensor.shape
        if expert is not None:
            blob, shape = blob.reshape(shape[0], -1)[expert], shape[1:]
        if tensor.kind in _FLOATS:
            return torch.from_numpy(np.array(blob)).view(_FLOATS[tensor.kind]).view(shape)
        rows = blob.reshape(int(np.prod(shape[:-1])), -1)
        return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType(tensor.kind))).view(shape)


@functools.lru_cache(maxsize=2)
def _read(file: Path, changed_ns: int, size: int) -> tuple[GgufHeader, dict[str, int]]:
    """The header, and the numbers of heads whose rows are interleaved. Files are reopened for every few tensors."""
    header = read_header(file, with_texts=False)
    config = gguf_config(header)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    return header, heads if config["model_type"] == "llama" else {}
