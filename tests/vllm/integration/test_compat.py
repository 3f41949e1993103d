"""Compatibility checks on vLLM's own configuration and cache specifications."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from baton.errors import ConfigError
from baton.vllm import caches, compat, support
from baton.vllm.memory.geometry import WorkerHeads
from baton.vllm.memory.groups import CacheTable


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
    assert caches.split_cache_groups(SimpleNamespace(kv_cache_groups=groups)) == [
        CacheTable(0, "mla", None, 16, ("model.layers.0.attn",)),
        CacheTable(0, "full", None, 16, ("model.layers.1.attn",)),
        CacheTable(1, "sliding_window", 64, 16, ("model.layers.2.attn",)),
    ]


ATTENTION = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
MOVED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "FullAttentionSpec": (kv.FullAttentionSpec(**ATTENTION), ("full", None, 32)),
    # With vLLM's hybrid memory off: all blocks are kept, whatever the layer sees of them.
    "FullAttentionSpec, windowed": (kv.FullAttentionSpec(**ATTENTION, sliding_window=64), ("full", None, 32)),
    "FullAttentionSpec, chunked": (kv.FullAttentionSpec(**ATTENTION, attention_chunk_size=64), ("full", None, 32)),
    "SlidingWindowSpec": (kv.SlidingWindowSpec(**ATTENTION, sliding_window=64), ("sliding_window", 64, 32)),
    "MLAAttentionSpec": (kv.MLAAttentionSpec(**ATTENTION), ("mla", None, 32)),
    "MambaSpec": (kv.MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,)), ("state", None, 1)),
}
BY_GROUP = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}  # abstract ones, and one that contains others
REFUSED: dict[str, Any] = {
    "ChunkedLocalAttentionSpec": kv.ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64),
    "CircularBufferSpec": kv.CircularBufferSpec(**ATTENTION),
    "CrossAttentionSpec": kv.CrossAttentionSpec(**ATTENTION),
    "EncoderOnlyAttentionSpec": kv.EncoderOnlyAttentionSpec(**ATTENTION),
    "HiSparseHotSpec": kv.HiSparseHotSpec(block_size=32, page_size=64, blocks_per_request=1),
    "HiSparseResidentSpec": kv.HiSparseResidentSpec(block_size=32, page_size=64),
    "HiddenStateCacheSpec": kv.HiddenStateCacheSpec(**ATTENTION),
    "RSWASpec": kv.RSWASpec(**ATTENTION, rswa_window=64),
    "SinkFullAttentionSpec": kv.SinkFullAttentionSpec(**ATTENTION, sink_len=4),
    "SlidingWindowMLASpec": kv.SlidingWindowMLASpec(**ATTENTION, sliding_window=64),
}


def tables_of(spec: Any, **group: Any) -> list[CacheTable]:
    found = kv.KVCacheGroupSpec(["model.layers.0.attn"], spec, **group)
    return caches.split_cache_groups(SimpleNamespace(kv_cache_groups=[found]))


def test_each_kind_of_cache_is_moved_or_refused_by_name() -> None:
    for spec, (kind, window, block_size) in MOVED.values():
        assert tables_of(spec) == [CacheTable(0, kind, window, block_size, ("model.layers.0.attn",))]
    for name, spec in REFUSED.items():
        with pytest.raises(ConfigError, match=f"does not support a cache of {name}$"):
            tables_of(spec)


def test_no_kind_of_cache_is_unheard_of() -> None:
    """A new vLLM's new kinds must be here and in the documentation before that vLLM is supported."""
    kinds = {name for name, found in vars(kv).items() if isinstance(found, type) and issubclass(found, kv.KVCacheSpec)}
    assert kinds == {name.partition(",")[0] for name in MOVED} | REFUSED.keys() | BY_GROUP
    documented = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    assert all(f"`{name}`" in documented for name in kinds - BY_GROUP)


def test_what_a_known_kind_holds_otherwise_is_refused() -> None:
    full, latent = MOVED["FullAttentionSpec"][0], MOVED["MLAAttentionSpec"][0]
    with pytest.raises(ConfigError, match="got one for 4 tokens"):
        tables_of(dataclasses.replace(latent, tokens_per_state=4))
    with pytest.raises(ConfigError, match="does not support a cache of deepseek_v4 MLAAttentionSpec"):
        tables_of(dataclasses.replace(latent, model_version="deepseek_v4"))
    with pytest.raises(ConfigError, match=r"mamba_cache_mode.*'all'"):
        tables_of(dataclasses.replace(MOVED["MambaSpec"][0], mamba_cache_mode="all"))
    for change in ({"host_resident": True}, {"enable_kv_transfer": False}):
        with pytest.raises(ConfigError, match="HiSparse"):
            tables_of(full, **change)


RANKS: dict[str, Any] = {
    **{f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data", "prefill_context", "decode_context")},
    "data_parallel_external_lb": False,
    "data_parallel_index": 0,
}


def config(**more: Any) -> Any:
    """A vLLM configuration that is accepted, with `more` changed."""
    found = {
        "parallel_config": SimpleNamespace(**RANKS),
        "speculative_config": None,
        "kv_transfer_config": SimpleNamespace(engine_id="P"),
        "device_config": SimpleNamespace(device_type="cpu"),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "structured_outputs_config": SimpleNamespace(backend="auto"),
        "model_config": SimpleNamespace(use_mla=False, has_inner_state=False, enable_sleep_mode=False),
        "compilation_config": SimpleNamespace(is_custom_op_enabled=lambda name: name == "rotary_embedding"),
    }
    return SimpleNamespace(**found | more)


def drafter(method: str, several_modules: bool = False, model_type: str = "deepseek_mtp") -> Any:
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type), has_inner_state=False)
    return SimpleNamespace(
        method=method,
        use_multi_module_mtp=lambda: several_modules,
        draft_model_config=model if several_modules else None,
    )


def test_what_cannot_be_handed_off_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    support.check_config(config())
    independent = ParallelConfig(data_parallel_size=2, data_parallel_rank=1)
    assert not compat.steps_alone(config(parallel_config=independent))  # as for a model with experts
    independent.reconfigure_for_independent_dp_rank()
    assert compat.steps_alone(config(parallel_config=independent))
    assert independent.data_parallel_size == 1
    # As vLLM configures each engine, in its process.
    ranked = {"parallel_config": independent, "kv_transfer_config": SimpleNamespace(engine_id="P_dp1")}
    support.check_config(config(**ranked))
    assert compat.data_parallel_rank(config(**ranked)) == 1
    independent.data_parallel_external_lb = True
    assert compat.data_parallel_rank(config(**ranked)) is None
    assert compat.data_parallel_rank(config()) is None
    assert compat.data_parallel_rank(config(parallel_config=ParallelConfig())) is None
    stages = SimpleNamespace(**RANKS | {"pipeline_parallel_size": 2})
    several = [SimpleNamespace(**RANKS | {f"{kind}_parallel_size": 2}) for kind in ("tensor", "data")]
    for ranks in (stages, *several):
        support.check_config(config(parallel_config=ranks))
        with monkeypatch.context() as patch:
            patch.setattr(support, "check_version", lambda: "0.31")
            with pytest.raises(ConfigError, match=r"(tensor|pipeline|data)_parallel_size.*with vLLM 0.32"):
                support.check_config(config(parallel_config=ranks))
    with pytest.raises(ConfigError, match=r"speculative_config.*pipeline stages"):
        support.check_config(config(parallel_config=stages, speculative_config=drafter("eagle3")))
    for method in ("eagle", "eagle3", "mtp"):
        support.check_config(config(parallel_config=several[1], speculative_config=drafter(method)))
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        support.check_config(config(model_config=SimpleNamespace(enable_sleep_mode=True)))
    with pytest.raises(ConfigError, match=r"device.*xpu"):
        support.check_config(config(device_config=SimpleNamespace(device_type="xpu")))
    for method in ("medusa", "dspark"):
        with pytest.raises(ConfigError, match=f"speculative_config.*{method}"):
            support.check_config(config(speculative_config=drafter(method)))
    for method in support.DRAFT_METHODS:
        support.check_config(config(speculative_config=drafter(method)))
    state = SimpleNamespace(use_mla=False, has_inner_state=True, enable_sleep_mode=False)
    support.check_config(config(model_config=state))
    for method in ("mtp", "ngram"):
        with pytest.raises(ConfigError, match="Mamba"):
            support.check_config(config(model_config=state, speculative_config=drafter(method)))
    delta = SimpleNamespace(**vars(state), hf_text_config=SimpleNamespace(model_type="qwen3_next"))
    exact = SimpleNamespace(cache_dtype="auto", mamba_ssm_cache_dtype="float32")
    assert compat.prefill_multiple(config(model_config=delta)) == 64
    assert compat.prefill_multiple(config(model_config=state)) == compat.prefill_multiple(config()) == 1
    support.check_config(config(model_config=delta, cache_config=exact, speculative_config=drafter("mtp")))
    with pytest.raises(ConfigError, match="Mamba"):
        support.check_config(config(model_config=delta, cache_config=exact, speculative_config=drafter("ngram")))
    scaled = SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=True)
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        support.check_config(config(cache_config=scaled))
    small = drafter("draft_model")
    small.draft_model_config = state
    with pytest.raises(ConfigError, match="Mamba"):
        support.check_config(config(speculative_config=small))


def test_which_drafters_entries_depend_on_the_next_token() -> None:
    expected = {"eagle": 1, "eagle3": 1, "mtp": 1, "draft_model": None, "dflash": None}
    assert tuple(expected) == support.FORWARD_METHODS
    for method, module in expected.items():
        assert compat.draft_module(config(speculative_config=drafter(method))) == module


@pytest.mark.parametrize(
    ("model_type", "v2", "why"),
    [
        ("deepseek_mtp", False, None),  # the V1 runner computes every draft with the first module
        ("deepseek_mtp", True, "vLLM's V2 model runner drafts with each MTP module in turn"),
        ("step3p5_mtp", False, "Step-3.5's proposer drafts with each MTP module in turn"),
    ],
)
def test_several_mtp_modules_are_refused_where_later_ones_draft(model_type: str, v2: bool, why: str | None) -> None:
    found = config(speculative_config=drafter("mtp", True, model_type), use_v2_model_runner=v2)
    if why is None:
        support.check_config(found)
    else:
        with pytest.raises(ConfigError, match=f"speculative_config: {why}.*tokens after the prompt"):
            support.check_config(found)


@pytest.mark.parametrize(
    ("states", "device", "needed"),
    [
        ("float32", "cuda", None),
        ("bfloat16", "cpu", None),
        ("auto", "cpu", "float32 or bfloat16 or float16"),
        ("bfloat16", "cuda", "float32"),
    ],
)
def test_states_that_a_handoff_rounds_are_refused(states: str, device: str, needed: str | None) -> None:
    found = config(
        model_config=SimpleNamespace(
            use_mla=False,
            has_inner_state=True,
            enable_sleep_mode=False,
            hf_text_config=SimpleNamespace(model_type="qwen3_next"),
        ),
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(cache_dtype="auto", mamba_ssm_cache_dtype=states),
        speculative_config=drafter("mtp"),
    )
    if needed is None:
        support.check_config(found)
    else:
        with pytest.raises(ConfigError, match=f"states must be {needed}: .* got '{states}'"):
            support.check_config(found)


@pytest.mark.parametrize("name", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_ranks_of_contexts_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        support.check_config(config(parallel_config=SimpleNamespace(**RANKS | {name: 2})))


def test_the_heads_of_a_worker_are_those_of_its_rank() -> None:
    """Rank numbers continue through pipeline stages; a drafter may have other heads than the target."""

    def model(num_kv_heads: int) -> Any:
        return SimpleNamespace(get_total_num_kv_heads=lambda: num_kv_heads)

    found = config(model_config=model(8), parallel_config=SimpleNamespace(rank=5, tensor_parallel_size=4))
    assert compat.worker_heads(found) == WorkerHeads(1, 4, {"target": 8, "draft": 8})
    found.speculative_config = SimpleNamespace(draft_model_config=model(2))
    assert compat.worker_heads(found) == WorkerHeads(1, 4, {"target": 8, "draft": 2})


@pytest.mark.parametrize(
    ("rope", "kernel", "good"), [("default", True, False), ("default", False, True), ("yarn", True, True)]
)
def test_mla_needs_a_rope_that_is_right(rope: str, kernel: bool, good: bool) -> None:
    text = SimpleNamespace(rope_parameters={"rope_type": rope})
    found = config(
        model_config=SimpleNamespace(use_mla=True, has_inner_state=False, enable_sleep_mode=False, hf_text_config=text),
        compilation_config=SimpleNamespace(is_custom_op_enabled=lambda name: kernel),
    )
    if good:
        support.check_config(found)
    else:
        with pytest.raises(ConfigError, match="-rotary_embedding"):
            support.check_config(found)


def test_the_layout_of_a_convolution_state_is_a_fact() -> None:
    """vLLM chooses it by environment and CPU, and both layouts have equally many bytes."""
    mixer = SimpleNamespace(get_state_shape=lambda: ())
    attention = SimpleNamespace(isa="vec")
    context = {"model.layers.0.mixer": mixer, "model.layers.1.attn": attention}
    found = config(compilation_config=SimpleNamespace(static_forward_context=context))
    assert caches.layout_name(found, "model.layers.0.mixer") == f"SimpleNamespace/{get_conv_state_layout()}"
    assert caches.layout_name(found, "model.layers.1.attn") == "SimpleNamespace/vec"


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_parts_of_a_mamba2_state_are_all_of_it(ranks: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the shapes that vLLM itself computes."""
    layer = MambaMixer2.__new__(MambaMixer2)
    torch.nn.Module.__init__(layer)
    here = groups if groups % ranks == 0 else ranks  # a copy for each rank
    sizes = {"intermediate_size": 64, "num_heads": 8, "head_dim": 8, "ssm_state_size": 16, "conv_kernel_size": 4}
    vars(layer).update(sizes, tp_size=ranks, n_groups=here, num_spec=0, use_replayssm=False)
    layer.norm = torch.nn.Module()
    layer.norm.n_groups = groups
    monkeypatch.setattr(mamba_mixer2, "get_tensor_model_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(MambaMixer2, "get_state_dtype", lambda self: (torch.bfloat16, torch.float32))
    found = config(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2),
        parallel_config=SimpleNamespace(rank=ranks - 1, tensor_parallel_size=ranks),
        compilation_config=SimpleNamespace(static_forward_context={"0.mamba": layer, "1.attn": object()}),
    )
    (parts,) = caches.state_parts(found, ["0.mamba", "1.attn"]).values()
    (conv, state), (of_conv, of_state) = layer.get_state_shape(), layer.get_state_dtype()
    assert sum(part.num_heads * part.head_dim * part.dtype.itemsize for part in parts) == (
        math.prod(conv) * of_conv.itemsize + math.prod(state) * of_state.itemsize
    )
    last, width = ranks - 1, 16 * groups // ranks
    assert [(part.name, part.cut, part.first_head, part.num_heads) for part in parts] == [
        ("conv.x", "channels", last * 32, 64 // ranks),
        *(
            (name, *(("whole", 0, 16) if groups == 1 else ("channels", last * width, width)))
            for name in ("conv.B", "conv.C")
        ),
        ("ssm", "heads", last * 4, 8 // ranks),
    ]
    layer.use_replayssm = True
    assert caches.state_parts(found, ["0.mamba"]) == {}


def test_the_kernel_of_mla_is_a_fact() -> None:
    """vLLM chooses it by CPU and by `--attention-backend`."""
    names = []
    for kernel in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        context = {"model.layers.0.attn": SimpleNamespace(attn_backend=kernel.get_class())}
        model = SimpleNamespace(use_mla=True)
        found = config(compilation_config=SimpleNamespace(static_forward_context=context), model_config=model)
        names.append(caches.layout_name(found, "model.layers.0.attn"))
        assert caches.kernel_layout(found, "model.layers.0.attn") == "tokens"
    assert names == ["SimpleNamespace/CPU_MLA", "SimpleNamespace/AMX_MLA"]


def test_weights_from_a_hub_are_told_apart_by_commit() -> None:
    """A branch moves, and two hosts may have downloaded it at different times."""

    def weights(commit: str | None) -> str:
        model = SimpleNamespace(
            model="org/model",
            revision="main",
            dtype=torch.float32,
            quantization=None,
            tokenizer="org/model",
            tokenizer_revision=None,
            hf_config=SimpleNamespace(_commit_hash=commit, to_dict=lambda: {"eos_token_id": 2}),
            hf_text_config=SimpleNamespace(),
            try_get_generation_config=lambda: {"eos_token_id": [2, 7]},
            get_diff_sampling_param=lambda: {"temperature": 0.6},
            generation_config="auto",
            override_generation_config={},
            hf_overrides={"rms_norm_eps": 1e-3},
            hf_config_path=None,
        )
        facts = compat.facts(config(model_config=model), "0.32")
        assert facts["model.overrides"] == '{"rms_norm_eps": 0.001}'
        assert facts["output.eos_token_ids"] == "[2, 7]"
        assert facts["model.tokenizer"] == "org/model@main"
        assert facts["output.sampling_defaults"] == "temperature 0.6"
        return facts["model.weights"]

    assert weights("a1") == weights("a1") != weights("b2")
    assert weights(None) == "org/model@main"
