"""Loads models from Hugging Face checkpoint directories. Never pickle."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import RawConfig
from baton.models.layers.linear import Build
from baton.models.layers.parallel import SINGLE_RANK, Stage, TensorRank
from baton.models.loading.config_json import read_config, text_config
from baton.models.loading.dtypes import check_quantization, dtype_name, resolve_dtype
from baton.models.loading.filling import fill_module, weight_table
from baton.models.loading.gguf_config import gguf_form
from baton.models.loading.quantized import QuantizedWeights
from baton.models.loading.schemes import scheme_of
from baton.models.loading.stored import StoredTensors
from baton.models.loading.tensor_names import layer_index
from baton.models.registry import model_class

logger = logging.getLogger(__name__)


def load_model(
    path: str | Path,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    batch_invariant: bool = False,
    ranks: TensorRank = SINGLE_RANK,
    quantization: str | None = None,
) -> CausalLM:
    """`dtype` "auto": the checkpoint's own. `quantization`: see `Build`. Raises `CheckpointError`, and `ConfigError` if
    the model cannot be split over the ranks, or quantised here.
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
    """Raises `CheckpointError` for unknown formats."""
    scheme = scheme_of(raw, stored.names)
    return None if scheme is None else QuantizedWeights(scheme, stored.names)


def _of_stage(name: str | None, stage: Stage, layers: range) -> str | None:
    """None if the stage with these layers lacks the tensor."""
    if name is None or stage.count == 1:
        return name
    index = layer_index(name)
    is_here = stage.index == 0 if index is None else index in layers
    return name if is_here else None
