"""Draft models in shapes other than their target's, which is the demo model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from testkit.vllm.checkpoints import TOKENIZER
from testkit.vllm.drafters import DRAFTER, write
from testkit.vllm.servers import MODEL


def demo(folder: Path) -> None:
    """The demo model."""
    shutil.copytree(MODEL, folder)


def with_larger_draft_model(folder: Path) -> None:
    """A draft model of more layers than the demo model, twice its KV heads, and heads of twice the size."""
    demo(folder)
    reshaped(folder / DRAFTER, num_real=3, num_idle=3, kv_heads=8, widen=2)


def with_smaller_draft_model(folder: Path) -> None:
    """A draft model of fewer layers than the demo model, and one KV head."""
    demo(folder)
    reshaped(folder / DRAFTER, num_real=2, num_idle=0, kv_heads=1)


def reshaped(folder: Path, num_real: int, num_idle: int, kv_heads: int, widen: int = 1) -> None:
    """The demo model's first layers, then `num_idle` that add nothing. With more KV heads, or heads `widen` times as
    large, it computes what they compute; with fewer KV heads, their means.

    The elements of a wider head are those of equal rotary frequencies, and zeros between them.
    """
    config = json.loads((MODEL / "config.json").read_text())
    heads, dim = config["num_attention_heads"], config["head_dim"]
    weights = {name: weight.float() for name, weight in load_file(MODEL / "model.safetensors").items()}
    made = {name: weight for name, weight in weights.items() if ".layers." not in name}
    for number in range(num_real + num_idle):
        idle = number >= num_real
        source = f"model.layers.{0 if idle else number}."
        layer = {name.removeprefix(source): weight for name, weight in weights.items() if name.startswith(source)}
        for name in "qkv":
            rows = layer[f"self_attn.{name}_proj.weight"].unflatten(0, (-1, dim))
            rows = rows if name == "q" else _heads(rows, kv_heads)
            scale = math.sqrt(widen) if name == "q" else 1.0
            layer[f"self_attn.{name}_proj.weight"] = _wider(rows * scale, 1, widen).flatten(0, 1)
        out = _wider(layer["self_attn.o_proj.weight"].unflatten(1, (heads, dim)), 2, widen).flatten(1)
        layer["self_attn.o_proj.weight"] = out
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight") if idle else ():
            layer[name] = torch.zeros_like(layer[name])
        made |= {f"model.layers.{number}.{name}": weight for name, weight in layer.items()}
    config |= {"num_hidden_layers": num_real + num_idle, "num_key_value_heads": kv_heads, "head_dim": dim * widen}
    write(folder, config, made)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder)


def _heads(rows: Tensor, count: int) -> Tensor:
    """[count, dim, hidden] of [heads, dim, hidden]."""
    if count >= len(rows):
        return rows.repeat_interleave(count // len(rows), 0)
    return rows.unflatten(0, (count, -1)).mean(1)


def _wider(tensor: Tensor, axis: int, factor: int) -> Tensor:
    """Spread both halves of a head's elements."""
    half = tensor.shape[axis] // 2
    places = torch.cat([torch.arange(half) * factor, torch.arange(half) * factor + half * factor])
    shape = list(tensor.shape)
    shape[axis] *= factor
    return torch.zeros(shape).index_copy(axis, places, tensor)
