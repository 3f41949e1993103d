"""Questions to vLLM's own configuration and cache specifications."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1 import kv_cache_interface as kv

from baton.errors import ConfigError
from baton.vllm import compat
from baton.vllm.groups import CacheTable


def test_a_group_of_mla_and_full_attention_is_two_kinds_on_one_table() -> None:
    common = {"block_size": 16, "dtype": torch.float32}
    specs = {
        "model.layers.0.attn": kv.MLAAttentionSpec(num_kv_heads=1, head_size=576, **common),
        "model.layers.1.attn": kv.FullAttentionSpec(num_kv_heads=2, head_size=32, **common),
    }
    uniform = kv.UniformTypeKVCacheSpecs.from_specs(specs)
    assert uniform is not None
    groups = [kv.KVCacheGroupSpec(list(specs), uniform)]
    window = kv.SlidingWindowSpec(num_kv_heads=2, head_size=32, sliding_window=64, **common)
    groups.append(kv.KVCacheGroupSpec(["model.layers.2.attn"], window))
    assert compat.cache_tables(SimpleNamespace(kv_cache_groups=groups)) == [
        CacheTable(0, "mla", None, 16, ("model.layers.0.attn",)),
        CacheTable(0, "full", None, 16, ("model.layers.1.attn",)),
        CacheTable(1, "sliding_window", 64, 16, ("model.layers.2.attn",)),
    ]


def config(**more: Any) -> Any:
    """A configuration of vLLM's that is accepted, but for `more`."""
    ranks = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1)
    found = {
        "parallel_config": SimpleNamespace(**ranks),
        "speculative_config": None,
        "device_config": SimpleNamespace(device_type="cpu"),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "model_config": SimpleNamespace(use_mla=False, has_inner_state=False),
        "compilation_config": SimpleNamespace(is_custom_op_enabled=lambda name: name == "rotary_embedding"),
    }
    return SimpleNamespace(**found | more)


def test_what_cannot_be_handed_off_is_refused_by_name() -> None:
    compat.check_config(config())
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        compat.check_config(config(parallel_config=SimpleNamespace(**ranks)))
    with pytest.raises(ConfigError, match=r"device.*xpu"):
        compat.check_config(config(device_config=SimpleNamespace(device_type="xpu")))
    with pytest.raises(ConfigError, match=r"speculative_config.*medusa"):
        compat.check_config(config(speculative_config=SimpleNamespace(method="medusa")))
    state = SimpleNamespace(use_mla=False, has_inner_state=True)
    compat.check_config(config(model_config=state))
    with pytest.raises(ConfigError, match="Mamba"):
        compat.check_config(config(model_config=state, speculative_config=SimpleNamespace(method="ngram")))


@pytest.mark.parametrize(
    ("rope", "kernel", "good"), [("default", True, False), ("default", False, True), ("yarn", True, True)]
)
def test_mla_needs_a_rope_that_is_right(rope: str, kernel: bool, good: bool) -> None:
    text = SimpleNamespace(rope_parameters={"rope_type": rope})
    found = config(
        model_config=SimpleNamespace(use_mla=True, has_inner_state=False, hf_text_config=text),
        compilation_config=SimpleNamespace(is_custom_op_enabled=lambda name: kernel),
    )
    if good:
        compat.check_config(found)
    else:
        with pytest.raises(ConfigError, match="-rotary_embedding"):
            compat.check_config(found)


def test_the_layout_of_a_convolution_state_is_a_fact() -> None:
    """vLLM chooses it by environment and CPU, and the bytes of two layouts are as many."""
    mixer = SimpleNamespace(get_state_shape=lambda: ())
    attention = SimpleNamespace(isa="vec")
    context = {"model.layers.0.mixer": mixer, "model.layers.1.attn": attention}
    found = config(compilation_config=SimpleNamespace(static_forward_context=context))
    assert compat.layout_name(found, "model.layers.0.mixer") == f"SimpleNamespace/{get_conv_state_layout()}"
    assert compat.layout_name(found, "model.layers.1.attn") == "SimpleNamespace/vec"
