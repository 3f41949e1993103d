"""Targets with latents and experts: the tokens of transformers, on one engine and after handoffs, in any batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.config import SpeculativeConfig
from baton.engine.executor import LocalExecutor
from baton.engine.step_plans import Rows
from baton.errors import CheckpointError
from baton.models.loading.loader import load_model
from baton.models.registry import model_class
from baton.sampling_params import SamplingParams
from testkit.checkpoints.common import make_drafter
from testkit.checkpoints.moe import SHAPES, make_moe_checkpoint
from testkit.engines import Stepped, pair, stepped
from tests.engine.models.test_transformers_equality import judge, load_reference, make_predictable, reference_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + (7 * i + 13 * n + i * i) % 200 for i in range(n)] for n in (1, 17, 64, 90)]
SPARSE = ("deepseek_v32", "glm_moe_dsa")
ORDINARY = ("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_moe")
Settings = dict[str, Any]
Make = Callable[..., Path]


def settings_of(target: Path, head: Path | None = None, method: str = "eagle3", **more: Any) -> Settings:
    spec = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    parsed = SpeculativeConfig.parse(json.dumps(spec)) if head else None
    return {"model": str(target), "speculative_config": parsed, "dtype": "float32", **more}


def tokens_of(settings: Settings, prompts: list[list[int]]) -> list[list[int]]:
    with stepped(**settings) as one:
        return [stream.token_ids for stream in one.all_of(prompts, GREEDY)]


def generate(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize(
    ("shape", "seed"), [*((shape, 1) for shape in sorted(SHAPES)), *((shape, 2) for shape in (*ORDINARY, *SPARSE))]
)
def test_greedy_tokens_are_those_of_transformers(shape: str, seed: int, tmp_path: Path) -> None:
    target = make_moe_checkpoint(tmp_path, shape, seed)
    model = load_reference(target)
    # Among equal scores, transformers selects other entries for a whole sequence than token by token.
    generated = [generate(model, prompt) for prompt in PROMPTS] if shape.startswith(SPARSE) else None
    # Prompts expanded and decoding absorbed, then all rows alike; whole prompts, then chunks.
    for invariant, budget in ((False, 2048), (True, 40)):
        settings = settings_of(target, batch_invariant=invariant, max_num_batched_tokens=budget)
        for i, (prompt, got) in enumerate(zip(PROMPTS, tokens_of(settings, PROMPTS), strict=True)):
            expected = generated[i] if generated else reference_tokens(model, prompt, got, NUM_TOKENS)
            if got != expected:
                is_tie, text = judge(model, prompt, expected, got)
                assert is_tie, (invariant, len(prompt), text)


# ---------------------------------------------------------------- batch invariance

LENGTH = 75
Span = tuple[int, int, int]  # request, first row, end


def hidden_of(one: Stepped, forwards: list[list[Span]]) -> list[Tensor]:
    """Final states of both requests' rows, from forwards over some of them at a time."""
    assert isinstance(one.core.executor, LocalExecutor)
    runner = one.core.executor.runner
    rng = np.random.default_rng(0)
    ids = np.random.default_rng(1).integers(0, 256, (2, LENGTH))
    tables = {}
    for group in runner.spec.target_groups:
        count = -(-LENGTH // runner.kv[group].spec.page_size)
        tables[group] = rng.permutation(np.arange(1, 2 * count + 1, dtype=np.int32)).reshape(2, count)
    found: list[list[Tensor]] = [[], []]
    for spans in forwards:
        rows = Rows(
            token_ids=np.concatenate([ids[r, start:stop] for r, start, stop in spans]),
            positions=np.concatenate([np.arange(start, stop) for _, start, stop in spans]),
            query_start=np.cumsum([0, *(stop - start for _, start, stop in spans)]).astype(np.int32),
            tables={name: table[[r for r, _, _ in spans]] for name, table in tables.items()},
        )
        hidden = runner.forward(rows).hidden_TE
        for (r, _, _), part in zip(spans, hidden.split([stop - start for _, start, stop in spans]), strict=True):
            found[r].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", ["deepseek_v2-groups", "deepseek_v3", "deepseek_v3-odd", "deepseek_v32-odd", "glm_moe_dsa", "qwen3_moe"]
)
def test_a_rows_bits_depend_on_its_own_request_alone(shape: str, dtype: str, tmp_path: Path) -> None:
    target = make_moe_checkpoint(tmp_path, shape)
    ways: list[tuple[int, list[list[Span]]]] = [
        (16, [[(0, 0, LENGTH)], [(1, 0, LENGTH)]]),
        (16, [[(0, 0, LENGTH), (1, 0, LENGTH)]]),
        (7, [[(1, 0, 64), (0, 0, 1)], [(0, 1, 40), (1, 64, 65)], [(1, 65, LENGTH), (0, 40, 66)], [(0, 66, LENGTH)]]),
        (16, [[(0, 0, 61), (1, 0, 61)], *([(1, i, i + 1), (0, i, i + 1)] for i in range(61, LENGTH))]),
    ]
    expected: list[Tensor] | None = None
    for block_size, forwards in ways:
        with stepped(
            **settings_of(target, block_size=str(block_size), batch_invariant=True, **{"dtype": dtype})
        ) as one:
            found = hidden_of(one, forwards)
        expected = expected or found
        for r in (0, 1):
            assert torch.equal(found[r], expected[r]), (block_size, r)


# ---------------------------------------------------------------- cache and handoffs

CACHED = ("deepseek_v2-lite", "deepseek_v3", "glm4_moe", "glm_moe_dsa", "qwen3_moe")


def with_head(folder: Path, shape: str, method: str) -> Settings:
    """A target with a Llama-type head: EAGLE-3 with random weights, or an EAGLE head that guesses some tokens."""
    target = make_moe_checkpoint(folder / "target", shape)
    head = make_drafter(folder / "head", method, target)
    if method == "eagle":
        make_predictable(target, head)
    return settings_of(target, head, method, batch_invariant=True)


@pytest.mark.parametrize(("shape", "method"), [*((shape, "eagle") for shape in CACHED), ("deepseek_v3", "eagle3")])
def test_neither_hits_nor_preemption_nor_handoffs_change_a_token(shape: str, method: str, tmp_path: Path) -> None:
    settings = with_head(tmp_path, shape, method)
    plain = tokens_of({**settings, "speculative_config": None}, PROMPTS)
    with stepped(**settings, max_num_batched_tokens=24) as one:
        whole = one.all_of(PROMPTS, GREEDY)
        again = one.all_of(PROMPTS, GREEDY)
        assert one.core.metrics.num_cached_tokens > 0
        assert [stream.token_ids for stream in whole] == plain
        assert [stream.token_ids for stream in again] == plain
        num_accepted = sum(sum(stream.accepted) for stream in whole)
        assert method == "eagle3" or num_accepted > 0
    few = (LONGEST + NUM_TOKENS + 4) // 8 + 2
    sizes = {"block_size": "8", "max_model_len": 8 * few, "kv_cache_memory": memory_of(settings, 8, 2 * few)}
    with stepped(**settings, **sizes, max_num_seqs=4) as one:
        assert [stream.token_ids for stream in one.all_of(PROMPTS[1:] * 2, GREEDY)] == plain[1:] * 2
        assert one.core.scheduler.num_preemptions > 0
    with pair(tmp_path, {"block_size": "7,draft=9"}, **settings, integrity="full", max_num_batched_tokens=24) as two:
        two.check_handoffs(whole, PROMPTS, GREEDY)


LONGEST = max(len(prompt) for prompt in PROMPTS)


def memory_of(settings: Settings, block_size: int, num_pages: int) -> int:
    with stepped(**{**settings, "block_size": str(block_size), "kv_cache_memory": 8 << 20}) as one:
        assert isinstance(one.core.executor, LocalExecutor)
        return num_pages * sum(memory.spec.page_bytes for memory in one.core.executor.runner.kv.values())


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("shape", ["deepseek_v3", "glm4_moe"])
def test_tensors_of_layers_after_the_last_are_left_to_a_drafter(shape: str, tmp_path: Path) -> None:
    target = make_moe_checkpoint(tmp_path, shape, num_nextn_predict_layers=1)
    file = target / "model.safetensors"
    save_file({**load_file(file), "model.layers.3.eh_proj.weight": torch.ones(3, 6)}, file, {"format": "pt"})
    assert len(load_model(target).kv_layers) == 3
    save_file({**load_file(file), "model.layers.1.eh_proj.weight": torch.ones(3, 6)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.1\.eh_proj"):
        load_model(target)


@pytest.mark.parametrize(
    ("shape", "field", "value"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "num_experts_per_tok", 9),
        ("deepseek_v2", "num_key_value_heads", 2),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "n_group", 3),
        ("deepseek_v3", "n_group", 8),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("deepseek_v32", "mlp_layer_types", ["dense", "sparse"]),
        ("deepseek_v32", "q_lora_rank", None),
        ("deepseek_v32", "index_topk", 0),
        ("glm_moe_dsa", "index_topk_pattern", "SFF"),
        ("glm_moe_dsa", "indexer_types", ["full", "half", "full"]),
        ("glm_moe_dsa", "index_head_dim", 4),
        ("glm4_moe", "partial_rotary_factor", 0.2),
        ("qwen3_moe", "mlp_only_layers", "all"),
        ("qwen3_moe", "num_experts_per_tok", 9),
    ],
)
def test_unsupported_config_fields_are_refused_by_name(shape: str, field: str, value: object) -> None:
    model_type, fields = SHAPES[shape]
    raw = {
        **{"vocab_size": 260, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, **fields, field: value},
    }
    with pytest.raises(
        CheckpointError, match={"quantization_config": "fp8", "index_topk_pattern": "indexer_types"}.get(field, field)
    ):
        model_class(model_type).parse_config(raw)
