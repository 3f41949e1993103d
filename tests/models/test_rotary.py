"""Rotary embeddings: frequencies are those of transformers, in both config formats, and unknown types are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baton.errors import CheckpointError
from baton.models.config import RawConfig, decoder_fields, get_rope, get_rotary_dim
from baton.models.layers.rotary import Rotary, rotate, yarn_mscale

LENGTH = 4096
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 256}
SECTIONS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    YARN,
    YARN | {"truncate": False},
    YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    YARN | {"mscale": 0.707},
    YARN | {"attention_factor": 0.8, "mscale": 0.707, "mscale_all_dim": 1.3},
    YARN | {"factor": None},
    YARN | {"factor": 0.5},
    {"rope_type": "yarn", "factor": 4.0},
]


def rotary(spec_raw: RawConfig, size: int) -> Rotary:
    return Rotary(get_rope(spec_raw, LENGTH), size, LENGTH, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_frequencies_are_those_of_transformers(section: dict[str, Any], is_new: bool, partial: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

    shape = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": LENGTH}
    if is_new:
        raw = {**shape, "rope_parameters": section | {"rope_theta": 5e5, "partial_rotary_factor": partial}}
    else:
        old = {("type" if name == "rope_type" else name): value for name, value in section.items()}
        raw = {**shape, "rope_scaling": old, "rope_theta": 5e5, "partial_rotary_factor": partial}
    config = transformers.Glm4MoeConfig(**{k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()})
    positions = torch.tensor([0, 1, 17, 1000, LENGTH - 1])
    cos, sin = Glm4MoeRotaryEmbedding(config)(torch.zeros(1), positions[None])
    size = get_rotary_dim(raw, 32, 1.0)
    assert size == 32 * partial
    found = rotary(raw, size).at(positions)
    # Angles of thousands of radians are rounded in float32 before the cosine.
    for ours, theirs in zip(found, (cos, sin), strict=True):
        torch.testing.assert_close(ours[:, 0], theirs[0, :, : size // 2], rtol=1e-5, atol=2e-3)
        torch.testing.assert_close(ours[:3, 0], theirs[0, :3, : size // 2], rtol=1e-5, atol=1e-5)


def test_a_length_beside_the_section_counts_more() -> None:
    raw = {"rope_scaling": YARN, "original_max_position_embeddings": 512}
    assert get_rope(raw, LENGTH).params["original_max_position_embeddings"] == 512


def test_the_correction_of_deepseek() -> None:
    spec = get_rope({"rope_scaling": YARN | {"factor": 40.0}}, LENGTH)
    assert yarn_mscale(spec, 1.0) == pytest.approx(1.3688879)
    assert yarn_mscale(spec, 0.707) == pytest.approx(1.2608038)
    assert yarn_mscale(get_rope({}, LENGTH), 1.0) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_rest_of_a_partly_rotated_head_is_as_it_was(dtype: torch.dtype) -> None:
    """In the kernel and, for float64, without it."""
    cos, sin = (t.to(dtype) for t in rotary({}, 8).at(torch.arange(5, 12)))
    heads = torch.randn(7, 3, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = heads[:, :2, :8].contiguous()
    out = rotate(heads.clone(), 2, cos, sin)
    assert torch.equal(out[:, :, 8:], heads[:, :, 8:])
    assert torch.equal(out[:, 2], heads[:, 2])
    assert torch.equal(out[:, :2, :8], rotate(whole, 2, cos, sin))
    assert not torch.equal(out, heads)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, ["rope_type", "longrope", "yarn"]),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, ["rope_type", "yarn"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["factor", "missing", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, ["factor", "None", "linear"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, ["factor", "-2.0"]),
        ({"rope_scaling": YARN | {"attn_factor": 2.0}}, ["attn_factor", "2.0", "yarn"]),
        ({"rope_scaling": YARN | {"mscale": "1"}}, ["mscale", "'1'"]),
        ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, ["mrope_section", "default"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": YARN}, ["rope_parameters", "rope_scaling", "differ"]),
        ({"rope_parameters": {"rope_theta": "1e4"}}, ["rope_theta", "'1e4'"]),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 0.5}, ["original_max_position_embeddings"]),
        ({"partial_rotary_factor": 0.3}, ["partial_rotary_factor", "0.3"]),
        ({"partial_rotary_factor": 2.0}, ["partial_rotary_factor", "2.0"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    ],
)
def test_unknown_rope_types_are_refused_by_name(raw: dict[str, Any], words: list[str]) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 40, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 10}
    with pytest.raises(CheckpointError) as caught:
        decoder_fields({**sizes, "num_attention_heads": 4, **raw}, LENGTH)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("section", "theta"),
    [
        ({"rope_type": "linear", "factor": 1e-300}, 1e4),
        ({"rope_type": "llama3", "factor": 1e-308, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1e4),
        (YARN | {"factor": 1e-300}, 1e4),
        (YARN, 1.0),
        (YARN | {"beta_fast": -1.0}, 1e4),
        (YARN | {"beta_slow": 1e308}, 1e4),
        (YARN | {"attention_factor": 0.0}, 1e4),
        (YARN | {"attention_factor": -1.0}, 1e4),
        (YARN | {"mscale": -9.0, "mscale_all_dim": 1.0}, 1e4),
        (YARN | {"factor": 22026.465794806718, "mscale": 1.0, "mscale_all_dim": -1.0}, 1e4),
    ],
)
def test_a_table_without_numbers_is_refused_by_name(section: dict[str, Any], theta: float) -> None:
    with pytest.raises(CheckpointError, match="rope_parameters"):
        rotary({"rope_theta": theta, "rope_scaling": section}, 32)


SHAPE = {
    "vocab_size": 8,
    "hidden_size": 128,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 32,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, {"type": "linear", "factor": 8}),
        ({"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, {"rope_type": "llama3", **LLAMA3}),
        ({**YARN, "rope_theta": 5e5, "mscale": None}, {**YARN, "type": "yarn"}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH, "rope_theta": 5e5},
            {"type": "yarn", "factor": 4.0},
        ),
        ({"rope_type": "default", "rope_theta": 5e5}, {"type": "default"}),
    ],
)
def test_two_spellings_of_one_rope(new: dict[str, Any], old: dict[str, Any]) -> None:
    """Tools that know the old format write it beside the new one; transformers uses the old."""
    transformers = pytest.importorskip("transformers")
    raw = {**SHAPE, "max_position_embeddings": LENGTH, "rope_theta": 5e5, "rope_parameters": new, "rope_scaling": old}
    config = transformers.LlamaConfig(**{k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()})
    rotary_of_theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    ours = Rotary(get_rope(raw, LENGTH), 32, LENGTH, torch.float32, torch.device("cpu"))
    positions = torch.tensor([0, 1, 17])
    for found, expected in zip(ours.at(positions), rotary_of_theirs(torch.zeros(1), positions[None]), strict=True):
        torch.testing.assert_close(found[:, 0], expected[0, :, :16], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "old",
    [
        {"type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 8.0},
        {"type": "linear", "factor": 8.0, "rope_theta": 1e4},
        [8.0],
    ],
)
def test_two_ropes_are_refused(old: Any) -> None:
    new = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    with pytest.raises(CheckpointError, match="rope_parameters and rope_scaling differ"):
        get_rope({"rope_theta": 5e5, "rope_parameters": new, "rope_scaling": old}, LENGTH)
    with pytest.raises(CheckpointError, match="rope_parameters and rope_scaling differ"):
        get_rope({"rope_parameters": new, "rope_scaling": {"type": "linear", "factor": 8.0}}, LENGTH)


@pytest.mark.parametrize(
    ("section", "length"),
    [
        ({"type": "linear", "factor": 2.5}, 10240),
        ({"type": "llama3", **LLAMA3}, LENGTH),
        ({"type": "yarn", "factor": 4.0}, 4 * LENGTH),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, LENGTH),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}, 2 * LENGTH),
        ({"type": "linear", "factor": 1e307}, 1 << 31),
        (None, LENGTH),
    ],
)
def test_scaling_lengthens_the_context(section: dict[str, Any] | None, length: int) -> None:
    """As `_get_and_verify_max_len` of vLLM derives it."""
    fields = decoder_fields({**SHAPE, "max_position_embeddings": LENGTH, "rope_scaling": section}, LENGTH)
    assert fields["max_position"] == length


def test_a_table_grows_by_few_rows() -> None:
    spec = get_rope({"rope_theta": 1e4, "rope_type": "default"}, 32768)
    grown, whole = (Rotary(spec, 8, 32768, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    whole.tables(32767)
    lengths = [len(grown.tables(position)[0]) for position in range(4096, 32768, 16)]
    assert max(np.diff(lengths, prepend=4096)) <= 32768 // 8
    assert all(map(torch.equal, grown.tables(32767), whole.tables(32767)))
