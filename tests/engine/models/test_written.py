"""MiniMax-M2, Nemotron-H and Kimi Linear: tokens and drafts of transformers, with any chunks, drafts and handoffs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import SpeculativeConfig
from baton.errors import CheckpointError
from baton.models.loading.loader import load_model
from baton.wire import SamplingParams
from testkit.checkpoints.common import make_drafter
from testkit.engines import pair, random_prompt, stepped

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm  # noqa: E402

from testkit.checkpoints.written import make_written  # noqa: E402
from tests.drafters.test_mtp import drafts_of_the_engine  # noqa: E402 - needs transformers
from tests.engine.models.test_transformers_equality import assert_drafts, assert_greedy, load_reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 10
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# Shorter than the convolution, and around the reference's chunks of 16 and 64.
LENGTHS = (1, 2, 3, 17, 64, 90)
NAMES = (
    "minimax_m2",
    "minimax_m2, odd",
    "nemotron_h",
    "nemotron_h, odd",
    "nemotron_h, one expert",
    "kimi_linear",
    "kimi_linear, odd",
)
Find = Callable[[str], Path]


PROMPTS = [random_prompt(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Checkpoints by name, and EAGLE-3 heads ("NAME head"), each made once."""

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("written")
        if name.endswith(" head"):
            return make_drafter(folder, "eagle3", make(name.removesuffix(" head")))
        return make_written(folder, name, seed=len(name))

    return make


def settings(find: Find, name: str, drafter: str | None = None, **more: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"method": drafter, "num_speculative_tokens": 3}
    if drafter == "eagle3":
        spec["model"] = str(find(f"{name} head"))
    return {
        "model": str(find(name)),
        "speculative_config": SpeculativeConfig.parse(json.dumps(spec)) if drafter else None,
        "kv_cache_memory": 8 << 20,
        "dtype": "float32",
        **more,
    }


def drafter_of(name: str) -> str:
    return "mtp" if name.startswith("nemotron_h") else "eagle3"


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(name: str, find: Find) -> None:
    model, found = load_reference(find(name)), {}
    for drafter in (None, drafter_of(name)):
        with stepped(**settings(find, name, drafter, max_num_batched_tokens=40)) as one:
            found[drafter] = [stream.token_ids for stream in one.all_of(PROMPTS, PARAMS)]
    assert found[drafter_of(name)] == found[None]
    assert len({tuple(tokens) for tokens in found[None]}) > len(PROMPTS) // 2
    for prompt, got in zip(PROMPTS, found[None], strict=True):
        assert_greedy(model, prompt, got, NUM_TOKENS)


def test_drafts_of_a_nemotron_are_those_of_the_reference(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers drops the module's tensors, so the reference is made of its blocks."""
    path, prompt = find("nemotron_h"), random_prompt(33)
    tokens, drafts = drafts_of_the_engine(path, prompt, 1, monkeypatch, max_num_batched_tokens=10)
    model, stored = load_reference(path), load_file(path / "model.safetensors")
    config = model.config

    def part(module: Any, prefix: str) -> Any:
        own = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
        own = {n: t for n, t in own.items() if n.split(".")[0] in dict(module.named_children()) or "." not in n}
        if experts := [n for n in own if ".experts." in n]:
            for kind in ("up_proj", "down_proj"):
                one = [own[f"mixer.experts.{i}.{kind}.weight"] for i in range(config.n_routed_experts)]
                own[f"mixer.experts.{kind}"] = torch.stack(one)
            own = {n: t for n, t in own.items() if n not in experts}
        module.load_state_dict(own)
        return module.eval()

    def norm(name: str) -> Any:
        return part(NemotronHRMSNorm(config.hidden_size, config.layer_norm_epsilon), f"mtp.layers.{name}.")

    kinds = config.layers_block_type
    blocks = [
        part(NemotronHBlock(config, kinds.index(kind)), f"mtp.layers.{i}.")
        for i, kind in enumerate(("full_attention", "moe"))
    ]
    known = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        hidden, embeds = model.model(known).last_hidden_state[:, :-1], model.model.embeddings(known[:, 1:])
        x = torch.cat((norm("0.enorm")(embeds), norm("0.hnorm")(hidden)), dim=-1)
        x = x @ stored["mtp.layers.0.eh_proj.weight"].T
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), -torch.inf).triu(1)
        for block in blocks:
            x = block(x, attention_mask=mask)
        expected = model.lm_head(norm("1.final_layernorm")(x))[0]
    assert len(drafts) > NUM_TOKENS // 2
    assert_drafts(drafts, expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("minimax_m2, odd", "bfloat16"), ("nemotron_h, odd", "bfloat16"), ("kimi_linear, odd", "bfloat16")],
)
def test_neither_chunks_nor_neighbours_nor_drafts_change_a_bit(name: str, dtype: str, find: Find) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    expected = None
    for drafter, rows in ((None, 2048), (drafter_of(name), 7)):
        more = {"dtype": "bfloat16", "max_num_batched_tokens": rows, "batch_invariant": True}
        with stepped(**settings(find, name, drafter, **more)) as one:
            together = [stream.result for stream in one.all_of(PROMPTS, params)]
            alone = [one.all_of([prompt], params)[0].result for prompt in PROMPTS[::3]]
        expected = expected or together
        assert together == expected
        assert alone == expected[::3]


@pytest.mark.parametrize("name", ["nemotron_h, odd", "kimi_linear, odd"])
def test_a_handoff_changes_neither_tokens_nor_acceptance(name: str, find: Find, tmp_path: Path) -> None:
    common = settings(find, name, drafter_of(name), integrity="full", max_num_batched_tokens=32)
    with stepped(**common) as single, pair(tmp_path, {"block_size": 7}, **common) as two:
        two.check_handoffs(single.all_of(PROMPTS, PARAMS), PROMPTS, PARAMS)


@pytest.mark.parametrize("name", ["minimax_m2", "kimi_linear"])
def test_fields_of_published_configs_are_read(name: str, find: Find, tmp_path: Path) -> None:
    """MiniMax's `rotary_dim`, and Kimi's own names, with layers that count from 1."""
    raw = json.loads((find(name) / "config.json").read_text())
    if name == "minimax_m2":
        assert raw.pop("rotary_dim", 6) == 6
        raw = {**raw, "rope_parameters": None, "rotary_dim": 6, "rope_theta": 5e6, "attn_type_list": [1] * 3}
    else:
        linear = {"num_heads": 4, "head_dim": 12, "short_conv_kernel_size": 4}
        linear |= {"full_attn_layers": [2], "kda_layers": [1, 3, 4]}
        for field in ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim"):
            raw.pop(field)
        names = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"}
        for written, published in names.items():
            if written in raw:
                raw[published] = raw.pop(written)
        raw |= {"linear_attn_config": linear, "first_k_dense_replace": 1, "mla_use_nope": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).symlink_to(find(name) / file)
    found = []
    for path in (find(name), tmp_path):
        with stepped(model=str(path), speculative_config=None, kv_cache_memory=8 << 20) as one:
            found.append([stream.token_ids for stream in one.all_of(PROMPTS[-2:], PARAMS)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("minimax_m2", "attn_type_list", [1, 0, 1]),
        ("minimax_m2", "scoring_func", "softmax"),
        ("minimax_m2", "sliding_window", 8),
        ("minimax_m2", "shared_intermediate_size", 8),
        ("nemotron_h", "layers_block_type", ["mamba", "hyena"]),
        ("nemotron_h", "mamba_num_heads", 7),
        ("nemotron_h", "mlp_hidden_act", "silu"),
        ("nemotron_h", "attention_bias", True),
        ("nemotron_h", "time_step_limit", [0.1, 0.5]),
        ("kimi_linear", "layer_types", ["linear_attention"]),
        ("kimi_linear", "linear_attn_config", {"kda_layers": [1, 2], "full_attn_layers": [2]}),
        ("kimi_linear", "moe_router_activation_func", "softmax"),
        ("kimi_linear", "mla_use_nope", False),
    ],
)
def test_unsupported_config_fields_are_refused_by_name(
    name: str, field: str, value: object, find: Find, tmp_path: Path
) -> None:
    raw = json.loads((find(name) / "config.json").read_text())
    if field == "linear_attn_config":
        raw["layer_types"] = None
    (tmp_path / "config.json").write_text(json.dumps({**raw, field: value}))
    (tmp_path / "model.safetensors").symlink_to(find(name) / "model.safetensors")
    with pytest.raises(CheckpointError, match=field):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_nextn_predict_layers", 2), ("num_nextn_predict_layers", 0), ("mtp_hybrid_override_pattern", "ME")],
)
def test_modules_of_other_kinds_are_refused_by_name(field: str, value: object, find: Find, tmp_path: Path) -> None:
    raw = json.loads((find("nemotron_h") / "config.json").read_text())
    raw.pop("mtp_layers_block_type", None)
    (tmp_path / "config.json").write_text(json.dumps({**raw, field: value}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(find("nemotron_h") / name)
    spec = SpeculativeConfig.parse(json.dumps({"method": "mtp", "num_speculative_tokens": 2}))
    with pytest.raises(CheckpointError, match=field), stepped(model=str(tmp_path), speculative_config=spec):
        pass
