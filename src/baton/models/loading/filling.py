"""Fills a model's parameters from a checkpoint directory, whose headers are checked before any weight is read."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.models.layers.expert_parallel import RemoteExpert
from baton.models.layers.linear import Linear, WeightCut
from baton.models.layers.parallel import Share
from baton.models.loading.quantized import QuantizedWeights
from baton.models.loading.stored import open_weights, outline, weight_files

logger = logging.getLogger(__name__)

_EXPERT = re.compile(r"(.+\.experts\.\d+)\.")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Bytes of a weight file that are mapped at once.
_MAPPED_SIZE = 1 << 26

Rename = Callable[[str], str | None]
Unpack = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
# Bytes read of a checkpoint's weight files, and their total.
Watch = Callable[[int, int], None]

_WATCH: ContextVar[Watch] = ContextVar("watch", default=lambda read, total: None)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor to fill. If ranks share it, it is the part `cut` of the checkpoint's tensor."""

    tensor: Tensor
    cut: WeightCut | None = None

    @property
    def shape(self) -> list[int]:
        shape = list(self.tensor.shape)
        if self.cut is not None:
            shape[self.cut[0]] = self.cut[1].total
        return shape

    def fill(self, values: Tensor) -> None:
        if self.cut is not None:
            dim, share = self.cut
            values = values.narrow(dim, share.start, share.length)
        with torch.no_grad():
            self.tensor.copy_(values)


def weight_table(module: nn.Module) -> dict[str, Place]:
    """Checkpoint name -> place to fill, for all parameters and buffers. Merged layers are listed by part."""
    table: dict[str, Place] = {}
    modules = dict(module.named_modules())
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        owner, _, kind = name.rpartition(".")
        layer = modules[owner]
        parts: Mapping[str, Share] | None = getattr(layer, "parts", None)
        if parts is None:
            table[name] = Place(tensor, getattr(layer, "cuts", {}).get(kind))
            continue
        parent, start = owner.rpartition(".")[0], 0
        for part, share in parts.items():
            own = tensor[start : start + share.length]
            table[".".join(filter(None, (parent, part, kind)))] = Place(own, (0, share))
            start += share.length
    return table


@contextmanager
def watch_tensors(watch: Watch) -> Iterator[None]:
    """`fill_module` calls `watch` after each tensor in this context."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def keep_tensor(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    return ((name, tensor),)


def fill_module(
    module: nn.Module,
    path: str | Path,
    rename: Rename,
    unpack: Unpack = keep_tensor,
    quantized: QuantizedWeights | None = None,
) -> None:
    """Casts to the module's dtypes, and packs linear layers.

    `rename` maps a stored name to the module's, or to None to leave the tensor out. `unpack`: as `CausalLM.unpack`, for
    tensors on the meta device too. `quantized` joins the parts of quantised weights first. Raises `CheckpointError` for
    a missing or superfluous tensor, or another shape.
    """
    table = weight_table(module)
    packer = _Packer(module, table)
    remote = frozenset(name for name, part in module.named_modules() if isinstance(part, RemoteExpert))
    assign = _Assignment(Path(path), rename, unpack, quantized, remote)
    assign.check(table)
    bad: list[str] = []
    # Places leave the table: it would keep weights that packing has replaced.
    for name, place, values in assign.places(table, assign.tensors()):
        place.fill(values)
        if not _is_finite(place.tensor):
            bad.append(name)
        del place, values
        packer.filled(name)
    if bad:
        first = ", ".join(sorted(bad)[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        logger.warning("%s: weights are NaN or infinite: %s", path, first)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


@dataclass(frozen=True, slots=True)
class _Stored:
    file: Path
    name: str
    tensor: Tensor


class _Assignment:
    """Which tensor of a checkpoint goes where. `remote`: names of the experts that other ranks have."""

    def __init__(
        self,
        path: Path,
        rename: Rename,
        unpack: Unpack,
        quantized: QuantizedWeights | None,
        remote: Collection[str],
    ) -> None:
        self._path, self._rename, self._unpack = path, rename, unpack
        self._quantized, self._remote = quantized, remote
        self._sizes = {file: file.stat().st_size for file in weight_files(path)}

    def _name(self, stored: str) -> str | None:
        """The module's name of a tensor, or of the weight it is a part of; None: not read."""
        name = self._rename(stored)
        if name is not None and self._quantized is not None:
            weight = self._quantized.name(stored)
            name = None if weight is None else self._rename(weight)
        return None if name is None or _expert_of(name) in self._remote else name

    def check(self, table: Mapping[str, Place]) -> None:
        """By headers. Raises `CheckpointError`."""
        for _ in self.places(dict(table), self.outlines()):
            pass

    def places(self, table: dict[str, Place], found: Iterable[_Stored]) -> Iterator[tuple[str, Place, Tensor]]:
        """Places that leave `table`, with their values. Raises `CheckpointError`."""
        names, quantized = set(table), self._quantized
        for one in found:
            weight = one.tensor if quantized is None else quantized.add(one.name, one.tensor)
            for name, values in () if weight is None else self._unpack(str(self._name(one.name)), weight):
                if _expert_of(name) in self._remote:
                    continue  # from a stacked tensor
                if name not in names:
                    if quantized is not None and quantized.is_empty_bias(one.name, values):
                        continue
                    raise CheckpointError(f"{one.file}: unexpected tensor {one.name}")
                if name not in table:
                    raise CheckpointError(f"{one.file}: tensor {one.name} has the place of one before it")
                self._check(one, values, table[name])
                yield name, table.pop(name), values
        if table:
            first = ", ".join(sorted(table)[:3])
            rest = f" and {len(table) - 3} more" if len(table) > 3 else ""
            raise CheckpointError(f"{self._path}: missing tensor {first}{rest}")

    def _check(self, one: _Stored, values: Tensor, place: Place) -> None:
        kind = str(values.dtype).removeprefix("torch.")
        if values.is_floating_point() and not place.tensor.is_floating_point():
            raise CheckpointError(f"{one.file}: tensor {one.name} is {kind}, expected integers")
        if values.dtype not in _FLOATS and place.tensor.is_floating_point():
            why = "quantized weights are not supported"
            if self._quantized is not None:
                why = f"without the scale of a weight that is quantised by {self._quantized.scheme}"
            raise CheckpointError(f"{one.file}: tensor {one.name} is {kind}, {why}")
        if list(values.shape) != place.shape:
            shapes = f"{list(values.shape)}, expected {place.shape}"
            raise CheckpointError(f"{one.file}: tensor {one.name} has shape {shapes}")

    def outlines(self) -> Iterator[_Stored]:
        """Shapes and dtypes on the meta device, from the headers."""
        for file in self._sizes:
            with open_weights(file) as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    if self._name(name) is not None:
                        is_early = self._quantized is not None and self._quantized.is_early(name)
                        tensor = weights.get_tensor(name) if is_early else outline(file, weights, name)
                        yield _Stored(file, name, tensor)

    def tensors(self) -> Iterator[_Stored]:
        """The mapped part of an open file counts as this process's memory: it is reopened now and then."""
        watch, total, before = _WATCH.get(), sum(self._sizes.values()), 0
        for file, size in self._sizes.items():
            with open_weights(file) as weights:
                names = [name for name in weights.keys() if self._name(name) is not None]  # noqa: SIM118
            number = 0
            while number < len(names):
                with open_weights(file) as weights:
                    num_bytes = 0
                    while number < len(names) and num_bytes < _MAPPED_SIZE:
                        tensor = weights.get_tensor(names[number])
                        num_bytes += tensor.nbytes
                        number += 1
                        yield _Stored(file, names[number - 1], tensor)
                        watch(before + int(number / len(names) * size), total)
                    del tensor
            before += size


def _expert_of(name: str) -> str | None:
    match = _EXPERT.match(name)
    return match[1] if match else None


class _Packer:
    """Packs each linear layer when all its places are filled. Matching is by storage, so a layer with a tied weight is
    packed too."""

    def __init__(self, module: nn.Module, table: Mapping[str, Place]) -> None:
        owners: dict[int, Linear] = {}
        for layer in module.modules():
            if isinstance(layer, Linear):
                owners |= {tensor.untyped_storage().data_ptr(): layer for tensor in layer.parameters(recurse=False)}
        self._layers = {
            name: owners[pointer]
            for name, place in table.items()
            if (pointer := place.tensor.untyped_storage().data_ptr()) in owners
        }
        self._left = Counter(self._layers.values())

    def filled(self, place: str) -> None:
        layer = self._layers.get(place)
        if layer is not None:
            self._left[layer] -= 1
            if not self._left[layer]:
                layer.pack()
