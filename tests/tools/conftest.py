"""Makes `tools/` importable and offers the demo checkpoints to these tests."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tools.demo_training.target import target_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def models() -> Path:
    return ROOT / "models"


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """One thread for all of these tests."""


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    """A small target of the demo's type."""
    torch.manual_seed(1)
    config = target_config()
    config.vocab_size, config.hidden_size, config.intermediate_size = 400, 32, 48
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # the default initialisation gives nearly uniform logits
        parameter.data.mul_(4)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """Two rows of token ids."""
    return torch.from_numpy(np.random.default_rng(3).integers(5, 400, (2, 24)))
