"""DeepSeek-V4: logits and tokens of transformers, with any chunks, drafts, prefix hits and handoffs, and what a request
keeps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention import compressed
from baton.engine.attention.registry import get_backend
from baton.engine.config import EngineConfig, SpeculativeConfig
from baton.engine.memory.group_memory import GroupMemory
from baton.engine.memory.kv_memory import model_groups
from baton.engine.runner import ModelRunner
from baton.engine.step_plans import Rows
from baton.errors import CheckpointError
from baton.kv.interval import Rules
from baton.models.families.compressed import Compressor
from baton.models.layers.moe import HashRouter, Router
from baton.models.loading.loader import load_model
from baton.sampling_params import SamplingParams
from testkit.engines import pair, random_prompt, stepped

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

from testkit.checkpoints.written import make_written
from tests.drafters.test_mtp import drafts_of_the_engine
from tests.engine.models.test_transformers_equality import assert_drafts, assert_greedy, load_reference

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# One token, shorter than an entry, around entries of 3, 4, 6 and 8 tokens, and several windows.
LENGTHS = (1, 2, 3, 7, 8, 9, 17, 64, 90)
PROMPTS = [random_prompt(length) for length in LENGTHS]
PLAIN, ODD, LONG = "deepseek_v4", "deepseek_v4, odd", "deepseek_v4, long"
MTP = {"method": "mtp", "num_speculative_tokens": 3}
Find = Callable[[str], Path]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Checkpoints by name, each made once."""

    @functools.cache
    def make(name: str) -> Path:
        return make_written(tmp_path_factory.mktemp("v4"), name, seed=len(name))

    return make


def settings(find: Find, name: str, drafts: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "model": str(find(name)),
        "speculative_config": SpeculativeConfig.parse(json.dumps(MTP)) if drafts else None,
        "kv_cache_memory": 8 << 20,
        "dtype": "float32",
        **more,
    }


@torch.inference_mode()
def logits_of(path: Path, prompt: list[int], chunks: Sequence[int], block_size: str = "16") -> Tensor:
    """Logits [T, V] of a prompt in chunks. Unwritten memory is NaN."""
    model = load_model(path, "float32")
    groups = model_groups(EngineConfig(str(path), block_size=block_size), model, None)
    kv, tables = {}, {}
    for group in groups:
        pages = 1 + np.random.default_rng(0).permutation(group.rules.num_pages(len(prompt), group.page_size))
        kv[group.name] = GroupMemory.zeros(group, len(pages) + 1, torch.device("cpu"))
        kv[group.name].pages.fill_(0xFF)
        tables[group.name] = pages.astype(np.int32)[None]
    runner = ModelRunner(model, None, groups, kv, get_backend(None, "cpu"), torch.device("cpu"))
    made, start = [], 0
    for size in chunks:
        ids, positions = np.array(prompt[start : start + size]), np.arange(start, start + size)
        output = runner.forward(Rows(ids, positions, np.array([0, size], dtype=np.int32), tables))
        made.append(runner.logits(output, np.arange(size)))
        start += size
    return torch.cat(made)


@pytest.mark.parametrize(
    ("name", "seed", "length"),
    [(PLAIN, 1, 100), (PLAIN, 2, 1), (PLAIN, 3, 9), (ODD, 4, 101), (ODD, 5, 5), (LONG, 6, 270)],
)
def test_logits_are_those_of_transformers(name: str, seed: int, length: int, tmp_path: Path) -> None:
    path, prompt = make_written(tmp_path, name, seed), random_prompt(length, seed)
    with torch.inference_mode():
        expected = load_reference(path)(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_of(path, prompt, [length]), expected, rtol=1e-4, atol=1e-4)
    chunks = [1, *[23] * (length // 23), length % 23 - 1] if length % 23 > 1 else [length]
    torch.testing.assert_close(logits_of(path, prompt, chunks, "5"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [PLAIN, ODD])
def test_greedy_tokens_are_those_of_transformers(name: str, find: Find) -> None:
    model = load_reference(find(name))
    with stepped(**settings(find, name, max_num_batched_tokens=40)) as one:
        found = [stream.token_ids for stream in one.all_of(PROMPTS, GREEDY)]
    assert len({tuple(tokens) for tokens in found}) > len(PROMPTS) // 2
    for prompt, got in zip(PROMPTS, found, strict=True):
        assert_greedy(model, prompt, got, NUM_TOKENS)


def module_of(path: Path, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """The MTP module's layer, head of streams and norm as a model of transformers, and the module's other tensors."""
    stored = load_file(path / "model.safetensors")
    own = {name.removeprefix("mtp.0."): tensor for name, tensor in stored.items() if name.startswith("mtp.0.")}
    parts = {name: own.pop(name) for name in list(own) if name.split(".")[0] in ("enorm", "hnorm", "e_proj", "h_proj")}
    kept = {name: tensor for name, tensor in stored.items() if "embed" in name or name.endswith("head.weight")}
    for name, tensor in own.items():
        # Published checkpoints name the head of streams otherwise than transformers.
        name = name.replace("hc_head_", "hc_head.hc_")
        kept["model." + (name if name.startswith(("hc_head", "norm")) else f"layers.0.{name}")] = tensor
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    one = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    (folder / "config.json").write_text(json.dumps({**raw, **one}))
    return load_reference(folder), parts


@pytest.mark.parametrize("name", [PLAIN, ODD])
def test_drafts_are_those_of_the_reference(
    name: str, find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers drops the module's tensors, so the reference is made of its layer."""
    path, prompt = find(name), random_prompt(33)
    tokens, drafts = drafts_of_the_engine(path, prompt, 1, monkeypatch, max_num_batched_tokens=10)
    model, (module, parts) = load_reference(path), module_of(path, tmp_path)
    config, known, streams = model.config, torch.tensor([prompt + tokens]), list[Tensor]()
    model.model.layers[-1].register_forward_hook(lambda layer, inputs, output: streams.append(output))
    size = (config.hidden_size,)
    with torch.inference_mode():
        model(known)
        embeds = F.rms_norm(model.model.embed_tokens(known[:, 1:]), size, parts["enorm.weight"], config.rms_norm_eps)
        each = F.rms_norm(streams[0][:, :-1], size, parts["hnorm.weight"], config.rms_norm_eps)
        x = each @ parts["h_proj.weight"].T + (embeds @ parts["e_proj.weight"].T)[:, :, None]
        at = torch.arange(x.shape[1])
        hidden = (at[None, :] > at[:, None]) | (at[None, :] <= at[:, None] - config.sliding_window)
        mask = torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, -torch.inf)
        cos_sin = {"main": module.model.rotary_emb(x, position_ids=at[None], layer_type="main")}
        x = module.model.layers[0](x, position_embeddings=cos_sin, position_ids=at[None], attention_mask=mask)
        expected = model.lm_head(module.model.norm(module.model.hc_head(x)))[0]
    assert len(drafts) > NUM_TOKENS // 2
    assert_drafts(drafts, expected)


@pytest.mark.parametrize(("name", "dtype"), [(PLAIN, "float32"), (ODD, "bfloat16")])
def test_neither_chunks_nor_neighbours_nor_drafts_change_a_bit(name: str, dtype: str, find: Find) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)

    def results(drafts: bool, rows: int) -> tuple[list[Any], list[Any]]:
        more = {"dtype": dtype, "max_num_batched_tokens": rows, "batch_invariant": True}
        with stepped(**settings(find, name, drafts, **more)) as one:
            together = [stream.result for stream in one.all_of(PROMPTS, params)]
            return together, [one.all_of([prompt], params)[0].result for prompt in PROMPTS[::3]]

    together, alone = results(False, 2048)
    assert alone == together[::3]
    assert results(True, 7) == (together, alone)


def test_a_prefix_hit_anywhere_in_an_entry_changes_nothing(find: Find) -> None:
    """Prompts that share 1 to 40 tokens with one in the prefix cache, which goes on otherwise."""
    held = random_prompt(60, seed=7)
    prompts = [[*held[:shared], 255, *random_prompt(12, seed=shared)] for shared in (1, 3, 4, 15, 16, 18, 31, 32, 40)]
    with stepped(**settings(find, PLAIN, enable_prefix_caching=False)) as one:
        expected = [stream.token_ids for stream in one.all_of(prompts, GREEDY)]
    with stepped(**settings(find, PLAIN, block_size="4")) as one:
        one.all_of([held], GREEDY)
        streams = one.all_of(prompts, GREEDY)
    assert [stream.token_ids for stream in streams] == expected
    assert sum(stream.num_cached > 0 for stream in streams) > len(prompts) // 2


def test_a_handoff_changes_neither_tokens_nor_acceptance(find: Find, tmp_path: Path) -> None:
    common = settings(find, ODD, drafts=True, integrity="full", max_num_batched_tokens=13)
    with stepped(**common) as single, pair(tmp_path, {"block_size": "7"}, **common) as two:
        two.check_handoffs(single.all_of(PROMPTS, GREEDY), PROMPTS, GREEDY)


def final_before_its_entry(rules: Rules, num_tokens: int) -> int:
    return num_tokens


def test_an_entry_sent_before_it_is_complete_is_seen(find: Find, tmp_path: Path) -> None:
    common = settings(find, PLAIN, max_num_batched_tokens=13)
    with stepped(**common) as single:
        whole = single.all_of(PROMPTS, GREEDY)
    with (
        mock.patch.object(Rules, "complete", final_before_its_entry),
        pair(tmp_path, **common) as two,
        pytest.raises(AssertionError, match="other tokens"),
    ):
        two.check_handoffs(whole, PROMPTS, GREEDY)


def visible_at_its_first_token(batch: Any, rate: int) -> np.ndarray:
    return -(-(batch.positions + 1) // rate)


def without_the_window_before(compressor: Compressor, values: Tensor, gates: Tensor) -> Tensor:
    own = values[-compressor.rate :, -compressor.size :], gates[-compressor.rate :, -compressor.size :]
    weights = (own[1] + compressor.position_bias[:, -compressor.size :]).softmax(dim=0)
    return (own[0] * weights).sum(dim=0)


def routed_by_scores(router: HashRouter, x: Tensor, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    return Router.choose(router, x)


@pytest.mark.parametrize(
    ("owner", "attribute", "wrong"),
    [
        (compressed, "num_complete", visible_at_its_first_token),
        (Compressor, "_mixed", without_the_window_before),
        (HashRouter, "choose_for", routed_by_scores),
    ],
)
def test_wrong_arithmetic_is_seen(
    owner: Any, attribute: str, wrong: Any, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(40, seed=3)
    right = logits_of(find(PLAIN), prompt, [40])
    monkeypatch.setattr(owner, attribute, wrong)
    assert not torch.allclose(logits_of(find(PLAIN), prompt, [40]), right, atol=1e-3)


def test_a_request_keeps_a_window_and_an_entry_for_each_few_tokens(find: Find) -> None:
    """By hand, in numbers per token and layer: 16 of a window's token, 16 / 4 and 12 / 4 of an entry and its index key,
    16 / 8 of an entry; values and gates from which entries are made, 4 (16 + 12) with overlap and 2 x 16 without."""
    model = load_model(find(PLAIN))
    groups = model_groups(EngineConfig(str(find(PLAIN)), block_size="6"), model, None)
    found = [
        (group.kind, [plane.head_dim for plane in group.planes], group.window, group.page_size, group.layer_ids)
        for group in groups
    ]
    assert found == [
        ("sliding_window", [16], 9, 6, (0, 1, 2, 3)),
        ("sliding_window", [112], 8, 6, (1, 3)),
        ("compressed", [4, 3], None, 8, (1, 3)),
        ("sliding_window", [32], 8, 6, (2,)),
        ("compressed", [2], None, 8, (2,)),
    ]
    # Of 1,000 tokens: what windows hold for the next token, and complete entries.
    kept = sum(
        sum(plane.token_bytes for plane in group.planes) * len(group.rules.wanted(1000, 0)) * group.num_layers
        for group in groups
    )
    assert kept == 4 * (8 * 16 * 4 + 7 * 112 * 2 + 250 * (16 + 12) * 2 + 7 * 32 + 125 * 16)
    # Keys and values of all tokens for four heads.
    assert kept < 4 * 1000 * 2 * 4 * 16 * 4 / 20


def test_fields_of_published_configs_are_read(find: Find, tmp_path: Path) -> None:
    path = make_written(tmp_path / "new", LONG, seed=2)
    raw = json.loads((path / "config.json").read_text())
    for field in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"):
        raw.pop(field)
    raw |= {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1, "qk_rope_head_dim": 16}
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(raw))
    (old / "model.safetensors").symlink_to(path / "model.safetensors")
    prompt = random_prompt(140)
    assert torch.equal(logits_of(old, prompt, [140]), logits_of(path, prompt, [140]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["sliding_attention", "full_attention"] * 2),
        ("mlp_layer_types", ["dense"] * 4),
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", False),
        ("num_key_value_heads", 2),
        ("o_groups", 3),
        ("attention_bias", True),
        ("compress_rates", 4),
        ("rope_parameters", "yarn"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("n_routed_experts", 3),
    ],
)
def test_unsupported_config_fields_are_refused_by_name(field: str, value: object, find: Find, tmp_path: Path) -> None:
    raw = json.loads((find(PLAIN) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, field: value}))
    (tmp_path / "model.safetensors").symlink_to(find(PLAIN) / "model.safetensors")
    with pytest.raises(CheckpointError, match="tid2eid|experts" if field == "n_routed_experts" else field):
        load_model(tmp_path)
