"""gpt-oss: logits of transformers in every shape, MXFP4 bit for bit, batch-invariant rows, refused configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import CheckpointError
from baton.kernels.cpu.elementwise import clamped_glu
from baton.models.architectures.gpt_oss import GptOss
from baton.models.layers.linear import Build
from baton.models.layers.mxfp4 import dequantise_mxfp4
from baton.models.loading.filling import weight_table
from baton.models.loading.loader import load_model
from testkit.checkpoints.gpt_oss import GPT_OSS_SHAPES, make_gpt_oss
from tests.models.test_against_transformers import LENGTH, assert_logits_match, prompt, reference, run
from tests.models.test_loader import edit_config, edit_weights, refused

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt_oss(tmp_path_factory.mktemp("packed"), packed=True)


@pytest.fixture
def path(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "model"))


def unpack(path: Path) -> None:
    """Convert a checkpoint from MXFP4 as transformers dequantises it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights = load_file(path / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in weights if name.endswith("_blocks")]:
        blocks, scales = weights.pop(name + "_blocks"), weights.pop(name + "_scales")
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, quantization_config=None)


@pytest.mark.parametrize("shape", GPT_OSS_SHAPES)
def test_logits_match(shape: str, tmp_path: Path) -> None:
    assert_logits_match(make_gpt_oss(tmp_path, shape))


def test_sinks_matter(tmp_path: Path) -> None:
    model = load_model(make_gpt_oss(tmp_path))
    ids = prompt(model, 40)
    before = run(model, ids, "paged_cpu", [40])
    for layer in model.model.layers.values():
        layer.self_attn.sinks.fill_(-1e30)
    assert (run(model, ids, "paged_cpu", [40]) - before).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_what_transformers_makes_of_it(packed: Path, path: Path, dtype: str) -> None:
    unpack(path)
    ids = torch.arange(60) * 7 % 250
    ours, plain = (load_model(directory, dtype) for directory in (packed, path))
    assert torch.equal(run(ours, ids, "paged_cpu", [60]), run(plain, ids, "paged_cpu", [60]))
    if dtype == "float32":
        expected = reference(path, ids).logits[0]
        torch.testing.assert_close(run(ours, ids, "paged_cpu", [60]), expected, rtol=1e-4, atol=1e-4)


def test_every_code_and_scale() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 4, 16, 16).contiguous()
    scales = torch.tensor([1, 100, 127, 200], dtype=torch.uint8)[None, :, None].expand(1, 4, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    found = dequantise_mxfp4(blocks[0], scales[0])
    assert torch.equal(found, expected)
    assert torch.equal(found.bfloat16().float(), found)


def test_halves_in_other_files_and_in_any_order(packed: Path, path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = {0: [n for n in weights if not n.endswith("_blocks")], 1: [n for n in weights if n.endswith("_blocks")]}
    files = {part: f"model-{part + 1:05}-of-00002.safetensors" for part in names}
    for part, file in files.items():
        save_file({name: weights[name] for name in names[part]}, path / file)
    index = {"weight_map": {name: files[part] for part, found in names.items() for name in found}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = torch.arange(20)
    assert torch.equal(*(run(load_model(p), ids, "paged_cpu", [20]) for p in (packed, path)))


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    """If rounding sends a row to another expert both implementations deviate much, so medians are compared."""
    path = make_gpt_oss(tmp_path, dtype="bfloat16")
    model = load_model(path)
    assert model.build.dtype is torch.bfloat16
    assert model.model.layers["0"].self_attn.sinks.dtype is torch.float32
    ids = prompt(model)
    exact = run(load_model(path, "float32"), ids, "paged_cpu", [LENGTH])
    ours = (run(model, ids, "paged_cpu", [LENGTH]) - exact).abs().median()
    theirs = (reference(path, ids, torch.bfloat16).logits[0].float() - exact).abs().median()
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_equal_to_the_bit(dtype: str, packed: Path) -> None:
    """With any chunks and page size, and so with any rows that share an expert."""
    model = load_model(packed, dtype, batch_invariant=True)
    ids = prompt(model, 100)
    whole = run(model, ids, "paged_cpu", [100])
    assert [
        (chunks, page_size)
        for chunks, page_size in (([1] * 100, 16), ([3, 48, 4, 45], 7))
        if not torch.equal(run(model, ids, "paged_cpu", list(chunks), page_size), whole)
    ] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_that_of_pytorch(dtype: torch.dtype) -> None:
    x = (torch.randn(9, 2 * 37, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    gate, up = x.double()[:, ::2].clamp(max=7.0), x.double()[:, 1::2].clamp(-7.0, 7.0)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    found = clamped_glu(x, 1.702, 7.0)
    torch.testing.assert_close(found.double(), expected, **tolerance)
    for row in range(9):
        assert torch.equal(clamped_glu(x[row : row + 1], 1.702, 7.0)[0], found[row])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8", "mxfp4"]),
        ({"sliding_window": None}, ["sliding_window"]),
        ({"layer_types": ["full_attention"]}, ["layer_types"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"swiglu_limit": 0}, ["swiglu_limit"]),
        ({"num_experts_per_tok": 9, "num_local_experts": 8}, ["num_experts_per_tok", "9"]),
        ({"experts_per_token": 2, "num_experts_per_tok": 4}, ["experts_per_token"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "gain": 3}}, ["gain", "3"]),
    ],
)
def test_unsupported_config_fields_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        GptOss.parse_config(fields)
    for word in words:
        assert word in str(caught.value)


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    theirs, ours = transformers.GptOssConfig(), GptOss.parse_config({})
    assert (theirs.vocab_size, theirs.hidden_size, theirs.head_dim) == (
        ours.vocab_size,
        ours.hidden_size,
        ours.head_dim,
    )
    assert (theirs.rms_norm_eps, theirs.num_key_value_heads) == (ours.rms_eps, ours.num_kv_heads)
    assert [window or 0 for window in ours.windows] == [128 * (t == "sliding_attention") for t in theirs.layer_types]
    assert ours.moe is not None
    assert (theirs.num_local_experts, theirs.num_experts_per_tok) == (ours.moe.num_experts, ours.moe.top_k)
    assert (theirs.swiglu_alpha, theirs.swiglu_limit) == (ours.alpha, ours.limit)
    numbers = {name: value for name, value in theirs.rope_parameters.items() if name not in ("rope_type", "rope_theta")}
    assert dict(ours.rope.params) == numbers
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def test_halves_that_do_not_fit_are_refused(path: Path) -> None:
    file = path / "model.safetensors"
    blocks, scales = (load_file(file)[GATE_UP + ending] for ending in ("_blocks", "_scales"))
    edit_weights(path, **{GATE_UP + "_scales": scales[:, :, :1].contiguous()})
    refused(path, GATE_UP, "does not go with")
    edit_weights(path, **{GATE_UP + "_scales": torch.full_like(scales, 255)})
    refused(path, GATE_UP, "no number")
    edit_weights(path, **{GATE_UP + "_scales": None})
    refused(path, "missing tensor", "experts.0.gate_up_proj")
    fewer = {GATE_UP + "_scales": scales[:, :-1].contiguous(), GATE_UP + "_blocks": blocks[:, :-1].contiguous()}
    edit_weights(path, **fewer)
    refused(path, GATE_UP, "expected [64, 64]")
    edit_weights(path, **{GATE_UP + "_scales": scales[:5], GATE_UP + "_blocks": blocks[:5]})
    refused(path, GATE_UP, "6 experts")


def test_each_expert_gets_its_own(tmp_path: Path) -> None:
    path = make_gpt_oss(tmp_path)
    stored = load_file(path / "model.safetensors")[GATE_UP]
    config = GptOss.parse_config(json.loads((path / "config.json").read_text()))
    model = GptOss(config, Build(torch.float32, torch.device("cpu")))
    parts = dict(model.unpack(GATE_UP, stored))
    assert parts.keys() <= weight_table(model).keys()
    assert torch.equal(parts["model.layers.0.mlp.experts.3.gate_up_proj.weight"], stored[3].T)
