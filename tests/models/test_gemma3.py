"""Gemma 3: logits of transformers in every shape, batch-invariant rows, and refused configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import CheckpointError
from baton.kernels.cpu.elementwise import gelu_mul
from baton.models.architectures.gemma3 import Gemma3
from baton.models.config import get_float
from baton.models.layers.layernorm import Fp32RMSNorm
from baton.models.layers.linear import Build
from baton.models.loading.loader import load_model
from testkit.checkpoints.gemma3 import GEMMA3_SHAPES, make_gemma3
from tests.models.test_against_transformers import LENGTH, assert_logits_match, prompt, reference, run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("shape", GEMMA3_SHAPES)
def test_logits_match(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert_logits_match(make_gemma3(tmp_path, shape))


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    """The factor of embeddings is rounded to bfloat16: 7.75 for a hidden size of 60, whose root is 7.746."""
    pytest.importorskip("transformers")
    path = make_gemma3(tmp_path, "gemma3-odd", torch_dtype="bfloat16")
    model = load_model(path)
    assert model.config.embedding_multiplier == 7.75
    ids = prompt(model)
    states = reference(path, ids, torch.bfloat16)
    exact = run(load_model(path, "float32"), ids, "paged_cpu", [LENGTH])
    ours = (run(model, ids, "paged_cpu", [LENGTH]) - exact).abs().mean()
    theirs = (states.logits[0].float() - exact).abs().mean()
    assert ours < 1.5 * theirs
    embedded = model.model.embed_tokens(ids) * model.config.embedding_multiplier
    assert torch.equal(embedded, states.hidden_states[0][0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_equal_to_the_bit(dtype: str, tmp_path: Path) -> None:
    """With any chunks and page size."""
    model = load_model(make_gemma3(tmp_path, "gemma3-odd"), dtype, batch_invariant=True)
    ids = prompt(model)
    whole = run(model, ids, "paged_cpu", [LENGTH])
    assert [
        (chunks, page_size)
        for chunks, page_size in (([1] * LENGTH, 16), ([3, 48, 48, 4, 47], 7), ([64, 1, 85], 1))
        if not torch.equal(run(model, ids, "paged_cpu", list(chunks), page_size), whole)
    ] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_and_the_norm_are_those_of_pytorch(dtype: torch.dtype) -> None:
    x = (torch.randn(9, 2 * 73, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu_mul(x).double(), expected, **tolerance)
    norm = Fp32RMSNorm(146, 1e-6, 1.0, Build(dtype, torch.device("cpu")))
    norm.weight.copy_(torch.linspace(-0.5, 0.5, 146))
    found = norm(x)
    norm._on_cpu = False
    torch.testing.assert_close(found, norm(x), **tolerance)
    for row in range(9):
        assert torch.equal(gelu_mul(x[row : row + 1])[0], gelu_mul(x)[row])


def test_a_large_gate_is_no_accident() -> None:
    x = torch.tensor([[-200.0, -20.0, 0.0, 20.0, 200.0] + [1.0] * 5])
    torch.testing.assert_close(gelu_mul(x)[0], torch.tensor([0.0, 0.0, 0.0, 20.0, 200.0]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"hidden_activation": "gelu"}, ["hidden_activation", "gelu"]),
        ({"sliding_window": None}, ["sliding_window"]),
        ({"layer_types": ["sliding_attention"]}, ["layer_types"]),
        ({"layer_types": ["chunked_attention"] * 26}, ["layer_types", "chunked_attention"]),
        ({"sliding_window_pattern": 0}, ["sliding_window_pattern"]),
        ({"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, ["rope_parameters", "type of layer"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "ntk"}}}, ["rope_type", "ntk"]),
        ({"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}, ["sliding_attention"]),
        ({"rope_scaling": [8.0]}, ["rope_scaling"]),
        ({"rope_local_base_freq": -1}, ["rope_theta", "-1"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
    ],
)
def test_unsupported_config_fields_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        Gemma3.parse_config(fields)
    for word in words:
        assert word in str(caught.value)


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.Gemma3TextConfig(), Gemma3.parse_config({})
    for name, value in (
        ("vocab_size", ours.vocab_size),
        ("hidden_size", ours.hidden_size),
        ("intermediate_size", ours.intermediate_size),
        ("num_hidden_layers", ours.num_layers),
        ("num_attention_heads", ours.num_heads),
        ("num_key_value_heads", ours.num_kv_heads),
        ("head_dim", ours.head_dim),
        ("max_position_embeddings", ours.max_position),
        ("rms_norm_eps", ours.rms_eps),
        ("tie_word_embeddings", ours.tie_word_embeddings),
        ("sliding_window", ours.windows[0]),
    ):
        assert getattr(theirs, name) == value, name
    assert [window is not None for window in ours.windows] == [t == "sliding_attention" for t in theirs.layer_types]
    assert ours.attention_multiplier == theirs.query_pre_attn_scalar**-0.5
    kinds = {"full_attention": ours.rope, "sliding_attention": ours.layer_ropes[0]}
    for kind, rope in kinds.items():
        assert get_float(theirs.rope_parameters[kind], "rope_theta") == rope.theta
