"""Qwen3.5 and Qwen3-Next: tokens and drafts of transformers, with any chunks, drafts and handoffs."""

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
from testkit.engines import pair, random_prompt, stepped

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from testkit.checkpoints.qwen_hybrid import make_qwen_hybrid  # noqa: E402
from tests.drafters.test_mtp import drafts_of_layer, drafts_of_the_engine  # noqa: E402 - needs transformers
from tests.engine.models.test_transformers_equality import assert_drafts, assert_greedy, load_reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 12
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# Shorter than the convolution, and around the reference's chunks of 64.
LENGTHS = (1, 2, 3, 4, 17, 63, 64, 90)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3_5_text", {}),
    "odd": (
        "qwen3_5_text",
        {
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 7,
            "linear_value_head_dim": 9,
            "linear_conv_kernel_dim": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "layer_types": None,
            "full_attention_interval": 2,
        },
    ),
    "experts": ("qwen3_5_moe_text", {}),
    "one expert": ("qwen3_5_moe_text", {"num_experts": 1, "num_experts_per_tok": 1}),
    "next": ("qwen3_next", {}),
    "next, dense layers": ("qwen3_next", {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False}),
    "states alone": ("qwen3_5_text", {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}),
}
Find = Callable[[str], Path]


PROMPTS = [random_prompt(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Checkpoints by variant, each made once, with an MTP module if the model has attention."""

    @functools.cache
    def make(name: str) -> Path:
        kind, fields = VARIANTS[name]
        return make_qwen_hybrid(
            tmp_path_factory.mktemp("qwen"), kind, seed=len(name), with_mtp=name != "states alone", **fields
        )

    return make


def settings(model: Path, num_drafts: int = 0, **more: Any) -> dict[str, Any]:
    spec = json.dumps({"method": "mtp", "num_speculative_tokens": num_drafts})
    return {
        "model": str(model),
        "speculative_config": SpeculativeConfig.parse(spec) if num_drafts else None,
        "kv_cache_memory": 8 << 20,
        "dtype": "float32",
        **more,
    }


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "states alone"])
def test_greedy_tokens_are_those_of_transformers(name: str, find: Find) -> None:
    model = load_reference(find(name))
    for num_drafts in (0, 2):
        with stepped(**settings(find(name), num_drafts, max_num_batched_tokens=40)) as one:
            found = [stream.token_ids for stream in one.all_of(PROMPTS, PARAMS)]
        assert len({tuple(tokens) for tokens in found}) > len(PROMPTS) // 2
        for prompt, got in zip(PROMPTS, found, strict=True):
            assert_greedy(model, prompt, got, NUM_TOKENS)


def module_alone(path: Path, folder: Path) -> Any:
    """The MTP module's layer and norm, with the target's embedding and head, as a model of transformers."""
    raw, stored = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if "embed_tokens" in name or name.startswith("lm_head.")}
    own = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.layers.0.")}
    kept |= {name.replace("mtp.", "model."): tensor for name, tensor in own.items()}
    kept["model.norm.weight"] = stored["mtp.norm.weight"]
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (folder / "config.json").write_text(json.dumps({**raw, **one}))
    return load_reference(folder)


@pytest.mark.parametrize("name", ["dense", "experts", "next"])
def test_drafts_are_those_of_the_reference(
    name: str, find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers drops the module's tensors, so the reference is a model of its layer."""
    path, prompt = find(name), random_prompt(33)
    tokens, drafts = drafts_of_the_engine(path, prompt, 1, monkeypatch, max_num_batched_tokens=10)
    stored = load_file(path / "model.safetensors")
    norms = [1 + stored[f"mtp.pre_fc_norm_{which}.weight"] for which in ("embedding", "hidden")]
    module, projection = module_alone(path, tmp_path), stored["mtp.fc.weight"]
    expected = drafts_of_layer(load_reference(path), module, prompt + tokens, *norms, projection)
    assert len(drafts) > NUM_TOKENS // 2
    assert_drafts(drafts, expected)


@pytest.mark.parametrize(("name", "dtype"), [("odd", "bfloat16"), ("experts", "float32")])
def test_neither_chunks_nor_neighbours_nor_drafts_change_a_bit(name: str, dtype: str, find: Find) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    expected = None
    for num_drafts, rows in ((0, 2048), (3, 7)):
        with stepped(**settings(find(name), num_drafts, dtype=dtype, max_num_batched_tokens=rows)) as one:
            together = [stream.result for stream in one.all_of(PROMPTS, params)]
            alone = [one.all_of([prompt], params)[0].result for prompt in PROMPTS[::4]]
        expected = expected or together
        assert together == expected
        assert alone == expected[::4]


@pytest.mark.parametrize(("name", "num_drafts"), [("next", 3), ("states alone", 0)])
def test_a_handoff_changes_neither_tokens_nor_acceptance(
    name: str, num_drafts: int, find: Find, tmp_path: Path
) -> None:
    common = settings(find(name), num_drafts, integrity="full", max_num_batched_tokens=32)
    with stepped(**common) as single, pair(tmp_path, {"block_size": 7}, **common) as two:
        two.check_handoffs(single.all_of(PROMPTS, PARAMS), PROMPTS, PARAMS)


def test_the_bytes_of_a_state_do_not_grow_with_the_prompt(find: Find, tmp_path: Path) -> None:
    """Three layers of states, one of attention, and the module's: see the sizes of `checkpoints_qwen_hybrid`."""
    state = 3 * 4 * (3 * (24 + 24 + 40) + 4 * 12 * 10)
    token = 2 * 2 * 16 * 4
    with pair(tmp_path, **settings(find("dense"), 2, enable_prefix_caching=False)) as two:
        for length in (5, 45):
            before = two.decode.core.metrics.handoff_bytes
            two.legs(f"{length}", random_prompt(length), PARAMS, "push")
            two.settle()
            assert two.decode.core.metrics.handoff_bytes - before == state + length * 2 * token


def test_the_text_model_of_a_checkpoint_with_images_is_loaded(find: Find, tmp_path: Path) -> None:
    source = find("dense")
    raw = json.loads((source / "config.json").read_text())
    # As published: the type of the rotary embedding says how positions of images are laid out.
    raw["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": raw}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": False}))
    stored = load_file(source / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
              for name, tensor in stored.items()}  # fmt: skip
    nested["model.visual.blocks.0.norm.weight"] = torch.ones(3)
    save_file(nested, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").symlink_to(source / "tokenizer.json")
    with stepped(**settings(source, 2)) as one, stepped(**settings(tmp_path, 2)) as other:
        found = [each.all_of(PROMPTS[-2:], PARAMS) for each in (one, other)]
    assert [stream.token_ids for stream in found[0]] == [stream.token_ids for stream in found[1]]
    assert [stream.accepted for stream in found[0]] == [stream.accepted for stream in found[1]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("linear_num_value_heads", 3),
        ("layer_types", ["linear_attention", "full_attention", "mamba", "full_attention"]),
        ("attn_output_gate", False),
        ("mamba_ssm_dtype", "bfloat16"),
        ("hidden_act", "gelu"),
        ("norm_topk_prob", False),  # transformers' Qwen3.5 has no such field
    ],
)
def test_unsupported_config_fields_are_refused_by_name(field: str, value: object, find: Find, tmp_path: Path) -> None:
    source = find("experts")
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, field: value}))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(CheckpointError, match=field):
        load_model(tmp_path)


@pytest.mark.parametrize("field", ["mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"])
def test_modules_of_other_kinds_are_refused_by_name(field: str, find: Find, tmp_path: Path) -> None:
    raw = json.loads((find("dense") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, field: 2 if field.endswith("layers") else True}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(find("dense") / name)
    with pytest.raises(CheckpointError, match=field), stepped(**settings(tmp_path, 2)):
        pass
