"""Models cut over tensor ranks: with equally many slices, any number of ranks gives the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.attention.registry import get_backend
from baton.engine.config import EngineConfig
from baton.engine.loading.engine_facts import numeric_probe
from baton.engine.memory.kv_memory import model_groups, parts_of
from baton.errors import ConfigError
from baton.kv.spec import GroupSpec
from baton.models.architectures.minimax_m2 import HeadsNorm
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import MergedLinear
from baton.models.layers.parallel import Stage, TensorRank
from baton.models.loading.filling import weight_table
from baton.models.loading.loader import load_model
from testkit.checkpoints.gemma4 import make_gemma4
from testkit.checkpoints.gpt_oss import make_gpt_oss
from testkit.checkpoints.granite import make_granite
from testkit.checkpoints.qwen_hybrid import make_qwen_hybrid
from testkit.checkpoints.written import make_written
from testkit.handoffs.rank_threads import on_ranks, on_stages

Checkpoint = Callable[..., Path]
# Heads and widths that four ranks can share; two KV heads are on two ranks each.
FOUR: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
EXPERTS |= {"first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0}
LATENTS = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8}
LATENTS |= {"qk_nope_head_dim": 16, "v_head_dim": 16}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "glm4_moe": EXPERTS,
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **EXPERTS, **LATENTS},
    "deepseek_v32": {**EXPERTS, **LATENTS, "index_topk": 8, "index_n_heads": 8, "index_head_dim": 16},
}
# Of a gated delta net.
FOUR_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
# Models whose checkpoints keep the experts of a layer in one tensor.
STACKED: dict[str, Callable[[Path], Path]] = {
    "gemma4": functools.partial(
        make_gemma4, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24
    ),
    "gpt_oss": make_gpt_oss,
    "gpt_oss in MXFP4": functools.partial(make_gpt_oss, packed=True),
    "granite": functools.partial(make_granite, mamba_n_heads=8),
    "granite, experts": functools.partial(make_granite, mamba_n_heads=8, mamba_n_groups=4, num_local_experts=4),
    "qwen3_next": functools.partial(make_qwen_hybrid, kind="qwen3_next", **FOUR_HEADS),
    "minimax_m2": functools.partial(make_written, name="minimax_m2"),
    "nemotron_h": functools.partial(make_written, name="nemotron_h", mamba_num_heads=8, n_groups=4, moe_latent_size=20),
    "kimi_linear": functools.partial(make_written, name="kimi_linear"),
    "deepseek_v4": functools.partial(make_written, name="deepseek_v4", o_groups=4),
}
# For stages: Gemma 4 without layers that share keys, and each other kind of layer or residual stream once.
ALONE = {"gemma4, own keys": functools.partial(make_gemma4, shape="gemma4-k_is_v")}
STAGED = ("llama", "deepseek_v32", *ALONE, *STACKED.keys() - {"gemma4", "gpt_oss in MXFP4", "granite, experts"})


@pytest.fixture(scope="module")
def path_of(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def path_of(case: str) -> Path:
        if case in STACKED or case in ALONE:
            return {**STACKED, **ALONE}[case](tmp_path_factory.mktemp("stacked"))
        return checkpoint(case, **{**FOUR, **CASES[case]})

    return path_of


def probe(path: Path, dtype: str, ranks: TensorRank) -> str:
    """The numeric probe of a prompt's logits, as each rank computes it."""
    model = load_model(path, dtype, "cpu", True, ranks)
    config = EngineConfig(str(path), tensor_parallel_size=ranks.size)
    parts = parts_of(model_groups(config, model, None), config, model.config.num_layers, ranks.rank)
    groups = [group for group, _ in parts]
    return numeric_probe(model, groups, get_backend(None, "cpu"), torch.device("cpu"))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), (4, "bfloat16")])
@pytest.mark.parametrize("case", [*CASES, *STACKED])
def test_any_number_of_ranks_gives_the_same_bits(
    path_of: Callable[[str], Path], case: str, size: int, dtype: str
) -> None:
    path = path_of(case)
    one = probe(path, dtype, TensorRank(num_slices=4))
    assert on_ranks(size, 4, lambda ranks: probe(path, dtype, ranks)) == [one] * size


def outputs(path: Path, ranks: TensorRank) -> tuple[list[GroupSpec], list[Tensor]]:
    """The groups over all stages, then a prompt's hidden states and a drafter's features of every layer, as this stage
    has them.
    """
    model, found = load_model(path, "bfloat16", "cpu", True, ranks), list[Tensor]()
    config = EngineConfig(str(path), pipeline_parallel_size=ranks.stage.count)
    num_layers = model.config.num_layers
    whole = model_groups(config, model, None)
    parts = parts_of(whole, config, num_layers, ranks.stage.index)
    model.register_forward_pre_hook(lambda _, args: (*args[:3], tuple(range(num_layers + 2))))
    model.register_forward_hook(lambda _, args, got: found.extend([got[0], *got[1]]))
    numeric_probe(model, [group for group, _ in parts], get_backend(None, "cpu"), torch.device("cpu"))
    return whole, found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", sorted(STAGED))
def test_stages_give_the_bits_of_one_and_agree_on_pages(path_of: Callable[[str], Path], case: str) -> None:
    path = path_of(case)
    groups, one = outputs(path, TensorRank())
    stages = on_stages(3, lambda ranks: outputs(path, ranks))
    assert [whole for whole, _ in stages] == [groups] * 3
    assert len(one) >= 6
    assert [torch.equal(a, b) for a, b in zip(one, stages[0][1], strict=True)] == [True] * len(one)


def norm_own_heads_alone(norm: HeadsNorm, x: Tensor) -> Tensor:
    return RMSNorm.forward(norm, x.flatten(1)).view(x.shape)


def count_each_copy_of_a_head(norm: HeadsNorm, x: Tensor) -> Tensor:
    parts = norm._ranks.gather(x.float().square().sum(-1))
    mean = torch.cat(tuple(parts), dim=1).sum(1) / norm._size
    return norm.weight.view(x.shape[1:]) * (x.float() * mean.rsqrt()[:, None, None]).to(x.dtype)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("breaks", [norm_own_heads_alone, count_each_copy_of_a_head])
def test_a_norm_that_forgets_the_ranks_is_seen(
    path_of: Callable[[str], Path], breaks: Callable[[HeadsNorm, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of("minimax_m2")
    one = probe(path, "float32", TensorRank(num_slices=4))
    monkeypatch.setattr(HeadsNorm, "forward", breaks)
    assert one not in on_ranks(4, 4, lambda ranks: probe(path, "float32", ranks))


@pytest.mark.usefixtures("one_thread", "unpacked")
@pytest.mark.parametrize("case", [*CASES, *STACKED])
def test_ranks_hold_all_of_each_weight_between_them(path_of: Callable[[str], Path], case: str) -> None:
    path = path_of(case)
    whole = weight_table(load_model(path))
    tables = [weight_table(load_model(path, ranks=TensorRank(rank, 4, 4))) for rank in range(4)]
    num_cut = 0
    for name, place in whole.items():
        parts = [table[name] for table in tables]
        if parts[0].cut is None:
            assert all(torch.equal(part.tensor, place.tensor) for part in parts), name
            continue
        dim, num_cut = parts[0].cut[0], num_cut + 1
        held = torch.full_like(place.tensor, torch.nan)
        for part in parts:
            assert part.cut is not None
            held.narrow(dim, part.cut[1].start, part.cut[1].length).copy_(part.tensor)
        assert torch.equal(held, place.tensor), name
    assert num_cut >= 5 * 2  # of each layer at least q, o, gate, up, down


def test_a_row_has_the_bias_of_each_of_its_experts_once(path_of: Callable[[str], Path]) -> None:
    ranks = [TensorRank(), TensorRank(num_slices=4)]
    whole, cut = (load_model(path_of("gpt_oss"), ranks=each).model.layers["0"].mlp for each in ranks)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(whole(x), cut(x), atol=1e-5)


@pytest.mark.parametrize(
    ("size", "fields", "words"),
    [
        (4, {"num_attention_heads": 6, "num_key_value_heads": 2}, "does not divide the model's 6 attention heads"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3}, "neither divides nor is a multiple of 3 KV heads"),
        (4, {**FOUR, "intermediate_size": 90}, "does not divide the model's 90 inner numbers of an MLP"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_by_name(
    checkpoint: Checkpoint, size: int, fields: dict[str, Any], words: str
) -> None:
    path = checkpoint("llama", **fields)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: is {size}, which {words}"):
        load_model(path, ranks=TensorRank(0, size, size))


@pytest.mark.parametrize(
    ("size", "slices", "fields", "words"),
    [
        (4, 4, {}, "tensor_parallel_size: is 4, which does not divide the model's 6 heads of a state"),
        (
            4,
            4,
            {"mamba_n_heads": 8, "mamba_n_groups": 2},
            "tensor_parallel_size: is 4, which does not divide the model's 2 g",
        ),
        (
            1,
            8,
            {"mamba_n_groups": 3},
            "reduction_slices: is 8, which neither divides nor is a multiple of the model's 3 g",
        ),
    ],
)
def test_states_that_cannot_be_cut_are_named(
    tmp_path: Path, size: int, slices: int, fields: dict[str, Any], words: str
) -> None:
    path = make_granite(tmp_path, **fields)
    with pytest.raises(ConfigError, match=words):
        load_model(path, ranks=TensorRank(0, size, slices))


def test_more_stages_than_layers_are_named(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size: is 4, and the model has 3 layers"):
        load_model(checkpoint("llama"), ranks=TensorRank(stage=Stage(0, 4)))


@pytest.mark.usefixtures("unpacked")
def test_stages_hold_each_layer_once(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    whole = set(weight_table(load_model(path)))
    tables = [set(weight_table(load_model(path, ranks=TensorRank(stage=Stage(i, 2))))) for i in range(2)]
    assert tables[0] | tables[1] == whole
    assert not tables[0] & tables[1]
    assert {name for name in whole if not name.startswith("model.layers.")} <= tables[0]


def test_slices_that_do_not_fit_are_named(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama", **FOUR, intermediate_size=92)
    with pytest.raises(ConfigError, match="reduction_slices: is 8, which does not divide the model's 92 inputs"):
        load_model(path, batch_invariant=True, ranks=TensorRank(num_slices=8))


def test_a_merged_layer_knows_each_part(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("llama", **FOUR), ranks=TensorRank(3, 4, 4))
    qkv = next(layer for layer in model.modules() if isinstance(layer, MergedLinear) and "k_proj" in layer.parts)
    heads = {name: share.start * 4 // share.total for name, share in qkv.parts.items()}
    assert heads == {"q_proj": 3, "k_proj": 2, "v_proj": 2}
