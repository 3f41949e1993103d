"""Logits of every architecture equal those of transformers on the same random checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.attention.registry import get_backend
from baton.models.base import CausalLM
from baton.models.loading.loader import load_model
from testkit.handoffs.paged import PagedSequence

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 150
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 24}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    ),
    ("llama", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 37}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
]


def reference(path: Path, ids: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    with torch.inference_mode():
        return model(ids[None], output_hidden_states=True)


def prompt(model: CausalLM, length: int = LENGTH) -> Tensor:
    return torch.randint(0, model.vocab_size, (length,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def run(model: CausalLM, ids: Tensor, backend: str, chunks: list[int], page_size: int = 16) -> Tensor:
    sequence = PagedSequence(model.kv_layers, get_backend(backend, "cpu"), model.build.dtype, page_size)
    logits, start = [], 0
    for size in chunks:
        positions = sequence.rows(start, start + size)
        hidden, _ = model(ids[start : start + size], positions, sequence)
        logits.append(model.compute_logits(hidden))
        start += size
    return torch.cat(logits)


def assert_logits_match(path: Path) -> Tensor:
    """Check that the logits are those of `transformers`, with every backend, whole and in chunks. Returns them,
    [LENGTH, V].
    """
    model = load_model(path)
    ids = prompt(model)
    expected: Tensor = reference(path, ids).logits[0]
    for backend in ("paged_cpu", "sdpa"):
        for chunks in ([LENGTH], [1, 70, 64, 15]):
            torch.testing.assert_close(run(model, ids, backend, chunks), expected, rtol=1e-4, atol=1e-4)
    return expected


@pytest.mark.parametrize(("model_type", "overrides"), CASES)
def test_logits_match(model_type: str, overrides: dict[str, Any], checkpoint: Any) -> None:
    path = checkpoint(model_type, **overrides)
    expected = assert_logits_match(path)
    # The checkpoint discriminates between tokens: a wrong implementation cannot hide behind flat logits.
    best = expected.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.05


def test_batch_invariant_model_matches_too(checkpoint: Any) -> None:
    path = checkpoint("qwen2")
    model = load_model(path, batch_invariant=True)
    ids = prompt(model)
    expected = reference(path, ids).logits[0]
    torch.testing.assert_close(run(model, ids, "paged_cpu", [LENGTH]), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_close(checkpoint: Any) -> None:
    path = checkpoint("llama", torch_dtype="bfloat16")
    model = load_model(path)
    assert model.build.dtype is torch.bfloat16
    ids = prompt(model)
    expected = reference(path, ids, torch.bfloat16).logits[0].float()
    exact = run(load_model(path, "float32"), ids, "paged_cpu", [LENGTH])
    # bfloat16 has 8 bits: both implementations deviate from float32 by about the same.
    ours = (run(model, ids, "paged_cpu", [LENGTH]) - exact).abs().mean()
    theirs = (expected - exact).abs().mean()
    assert ours < 1.5 * theirs


def test_auxiliary_states_are_the_streams_entering_the_layers(checkpoint: Any) -> None:
    path = checkpoint("llama")
    model = load_model(path)
    ids = prompt(model, 20)
    states = reference(path, ids).hidden_states
    sequence = PagedSequence(model.kv_layers, get_backend(None, "cpu"))
    with torch.inference_mode():
        hidden, aux = model(ids, sequence.rows(0, 20), sequence, (0, 1, 2, 3))
    for layer in range(3):
        torch.testing.assert_close(aux[layer], states[layer][0], rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(model.model.norm(aux[3]), hidden)
    torch.testing.assert_close(hidden, states[3][0], rtol=1e-4, atol=1e-4)


def test_tokenizer_of_a_made_checkpoint_round_trips(checkpoint: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("llama"), local_files_only=True)
    text = "héllo, wörld\n  日本 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == json.loads((checkpoint("llama") / "config.json").read_text())["eos_token_id"]
