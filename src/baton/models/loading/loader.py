"""Loads models from Hugging Face checkpoint directories: config.json and safetensors, sharded or not. Never pickle.

Any fault of a directory raises a `CheckpointError` of one line that names the file, tensor or field.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import RawConfig
from baton.models.layers.expert_parallel import RemoteExpert
from baton.models.layers.linear import Build, Linear, WeightCut
from baton.models.layers.parallel import SINGLE_RANK, Share, Stage, TensorRank
from baton.models.loading.config_json import read_config, text_config
from baton.models.loading.dtypes import check_quantization, dtype_name, resolve_dtype
from baton.models.loading.gguf_config import gguf_form
from baton.models.loading.quantized import QuantizedWeights, scheme_of
from baton.models.loading.stored import StoredTensors, open_weights, weight_files
from baton.models.loading.tensor_names import layer_index
from baton.models.registry import model_class

logger = logging.getLogger(__name__)

_EXPERT = re.compile(r"(.+\.experts\.\d+)\.")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Bytes of a weight file mapped at once.
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
    """Copy the checkpoint's tensors into `module`, casting to its dtypes, and pack its linear layers.

    `rename` maps a stored name to the module's, or to None to leave the tensor out. `unpack`: as `CausalLM.unpack`.
    `quantized` joins the parts of quantised weights first. Raises `CheckpointError` unless tensors and places match.
    Peak memory: the weights once, one layer, and a piece of a file.
    """
    # Filled places leave the table, which would otherwise keep weights that packing has replaced.
    table = weight_table(module)
    places = set(table)
    unfilled = _Packer(module, table)
    remote = {name for name, part in module.named_modules() if isinstance(part, RemoteExpert)}

    def here(stored: str) -> str | None:
        name = rename(stored)
        if name is not None and quantized is not None:
            weight = quantized.name(stored)
            name = None if weight is None else rename(weight)
        return None if name is None or _expert_of(name) in remote else name

    sizes = {file: file.stat().st_size for file in weight_files(path)}
    watch, total, before = _WATCH.get(), sum(sizes.values()), 0
    for file, size in sizes.items():
        for stored, tensor, share in _stored(file, here):
            weight = tensor if quantized is None else quantized.add(stored, tensor)
            for place, values in () if weight is None else unpack(str(here(stored)), weight):
                if _expert_of(place) in remote:
                    continue  # from a stacked tensor
                if place not in places:
                    raise CheckpointError(f"{file}: unexpected tensor {stored}")
                if place not in table:
                    raise CheckpointError(f"{file}: tensor {stored} has the place of one before it")
                _check_fits(f"{file}: tensor {stored}", values, table[place])
                table.pop(place).fill(values)
                unfilled.filled(place)
            watch(before + int(share * size), total)
        before += size
    if table:
        first = ", ".join(sorted(table)[:3])
        rest = f" and {len(table) - 3} more" if len(table) > 3 else ""
        raise CheckpointError(f"{path}: missing tensor {first}{rest}")


def _check_fits(what: str, values: Tensor, place: Place) -> None:
    if values.dtype not in _FLOATS and place.tensor.is_floating_point():
        kind = str(values.dtype).removeprefix("torch.")
        raise CheckpointError(f"{what} is {kind}, quantized weights are not supported")
    if (found := list(values.shape)) != place.shape:
        raise CheckpointError(f"{what} has shape {found}, expected {place.shape}")


def _expert_of(name: str) -> str | None:
    found = _EXPERT.match(name)
    return found[1] if found else None


def _stored(file: Path, rename: Rename) -> Iterator[tuple[str, Tensor, float]]:
    """The tensors of a file that `rename` keeps, each with the share of them that is then read. The file is reopened
    now and then, since its mapped part counts as this process's memory.
    """
    with open_weights(file) as tensors:
        names = [name for name in tensors.keys() if rename(name) is not None]  # noqa: SIM118 - not a mapping
    number = 0
    while number < len(names):
        with open_weights(file) as tensors:
            num_bytes = 0
            while number < len(names) and num_bytes < _MAPPED_SIZE:
                tensor = tensors.get_tensor(names[number])
                num_bytes += tensor.nbytes
                number += 1
                yield names[number - 1], tensor, number / len(names)
            del tensor


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


def load_model(
    path: str | Path,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    batch_invariant: bool = False,
    ranks: TensorRank = SINGLE_RANK,
    quantization: str | None = None,
) -> CausalLM:
    """Load this rank's part of a checkpoint.

    `dtype` "auto": the checkpoint's own. `quantization`: see `Build`. Raises `CheckpointError`, `ConfigError`.
    """
    raw = text_config(read_config(path))
    cls = model_class(raw.get("model_type"))
    stored, chosen = StoredTensors(path), resolve_dtype(dtype, raw)
    if quantization is not None:
        check_quantization(quantization, chosen)
    if (quantized := quantized_weights(raw, stored)) is not None:
        raw = {**raw, "quantization_config": None}
    config = stored.resolve_tying(cls.parse_config(raw), chosen)
    stored.check_layers(config.num_layers)
    try:
        model = cls(config, Build(chosen, torch.device(device), batch_invariant, ranks, quantization))
    except (RuntimeError, MemoryError) as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: the model that config.json describes cannot be allocated: {why}") from None
    own = ranks.stage.layers(config.num_layers)
    unused = stored.unused(config.num_layers, cls.own_parts)

    def rename(name: str) -> str | None:
        return None if name in unused else _of_stage(model.stored_name(stored.name(name)), ranks.stage, own)

    if form := gguf_form(raw) if quantized is None else quantized.scheme:
        size = sum(place.tensor.nbytes for place in weight_table(model).values())
        logger.info("%s: weights in %s become %s, %.1f GiB", path, form, dtype_name(chosen), size / (1 << 30))
    fill_module(model, path, rename, model.unpack, quantized)
    if ranks.rank == ranks.stage.index == 0:
        stored.log_unused(unused)
    return model.eval()


def quantized_weights(raw: RawConfig, stored: StoredTensors) -> QuantizedWeights | None:
    """Raises `CheckpointError`."""
    scheme = scheme_of(raw)
    return None if scheme is None else QuantizedWeights(scheme, stored.names)


def _of_stage(name: str | None, stage: Stage, layers: range) -> str | None:
    """None if the stage with these layers lacks the tensor."""
    if name is None or stage.count == 1:
        return name
    index = layer_index(name)
    is_here = stage.index == 0 if index is None else index in layers
    return name if is_here else None
