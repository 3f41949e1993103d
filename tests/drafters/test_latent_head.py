"""An EAGLE-3 head whose layer attends over latents, against a forward in which every head has K and V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from baton.drafters.registry import load_drafter
from baton.engine.attention.base import AttnBatch
from baton.engine.attention.paged_cache import LayerMap, LayerPlace, PagedCache
from baton.engine.attention.registry import get_backend
from baton.engine.memory.group_memory import GroupMemory
from baton.kv.spec import GroupSpec, latent_planes
from baton.models.base import CausalLM
from baton.models.layer_cache import LatentLayerSpec
from baton.models.loading.loader import load_model
from testkit.checkpoints.drafters_layers import latent_head
from tests.drafters.test_drafters import TOKENS, inputs, layer_weights, mlp, norm

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, LATENT, NOPE, ROPE, VALUE = 4, 24, 12, 8, 10


def attention(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, ROPE, 2).double() / ROPE)
    turn = torch.polar(torch.ones(1).double(), torch.arange(len(x)).double()[:, None] * frequency)[:, None]

    def rotate(z: Tensor) -> Tensor:  # neighbouring elements are pairs
        return torch.view_as_real(torch.view_as_complex(z.double().unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(
            -2
        )

    def product(name: str, z: Tensor) -> Tensor:
        return F.linear(z, weights[f"self_attn.{name}.weight"])

    q = product("q_proj", x).view(len(x), HEADS, NOPE + ROPE).double()
    latent, key = product("kv_a_proj_with_mqa", x).split([LATENT, ROPE], -1)
    kv = product("kv_b_proj", norm(latent, weights["self_attn.kv_a_layernorm.weight"])).view(len(x), HEADS, -1).double()
    q = torch.cat((q[..., :NOPE], rotate(q[..., NOPE:])), -1)
    k = torch.cat((kv[..., :NOPE], rotate(key[:, None]).expand(-1, HEADS, -1)), -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (NOPE + ROPE) ** -0.5
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), kv[..., NOPE:])
    return product("o_proj", out.reshape(len(x), -1).float())


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True, "norm_before_residual": True}])
def test_a_head_of_latents_follows_its_equations(flags: dict[str, Any], tmp_path: Path, checkpoint: Any) -> None:
    target_path = Path(checkpoint("llama"))
    target: CausalLM = load_model(target_path)
    path = Path(latent_head(tmp_path / "head", target_path, **flags)["model"])
    weights, drafter = load_file(path / "model.safetensors"), load_drafter("eagle3", path, target)
    assert drafter.kv_layers == [LatentLayerSpec(LATENT, ROPE)]
    ids, features = inputs(192)
    layer, wide = layer_weights(weights, "midlayer."), features
    if flags:
        parts = features.split(64, -1)
        wide = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    hidden = F.linear(wide, weights["fc.weight"])
    normed = norm(hidden, layer["hidden_norm.weight"])
    embeds = norm(target.model.embed_tokens(ids), layer["input_layernorm.weight"])
    x = (normed if flags else hidden) + attention(layer, torch.cat((embeds, normed), -1))
    x = x + mlp(layer, norm(x, layer["post_attention_layernorm.weight"]))
    expected = norm(x, weights["norm.weight"])
    for chunks in ([TOKENS], [7, 1, 32]):
        out, feedback = _run(drafter, ids, features, chunks)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(feedback, expected if flags else x, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def _run(drafter: Any, ids: Tensor, features: Tensor, chunks: list[int]) -> tuple[Tensor, Tensor]:
    planes = latent_planes(LATENT, ROPE, "float32")
    spec = GroupSpec(name="draft", owner="draft", kind="mla", planes=planes, page_size=7, layer_ids=(0,), module=1)
    memory, table = GroupMemory.zeros(spec, 8, torch.device("cpu")), np.array([[3, 1, 5, 2, 7, 4, 6]], dtype=np.int32)
    parts, start = [], 0
    for size in chunks:
        positions = np.arange(start, start + size)
        batch = AttnBatch(np.array([0, size], dtype=np.int32), positions, table)
        cache = PagedCache(get_backend(None, "cpu"), LayerMap({0: [LayerPlace(memory, 0, None)]}), {"draft": batch}, {})
        rows = slice(start, start + size)
        parts.append(drafter(ids[rows], features[rows], torch.from_numpy(positions), cache, True))
        start += size
    out, feedback = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(feedback)
