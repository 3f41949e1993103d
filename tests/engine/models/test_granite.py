"""Granite hybrids: tokens of transformers, with any chunks, drafts and handoffs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import KVTransferConfig, SpeculativeConfig
from baton.errors import CheckpointError
from baton.kv.block_tables import BlockTables
from baton.models.loading.loader import load_model
from baton.sampling_params import SamplingParams
from testkit.checkpoints.common import make_drafter
from testkit.engines import Mode, Stepped, Stream, pair, random_prompt, request, stepped

pytest.importorskip("transformers")
from testkit.checkpoints.granite import make_granite
from tests.engine.models.test_transformers_equality import assert_greedy, load_reference

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 10
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
KV_MEMORY = 8 << 20
# Shorter than the convolution, and around the reference's chunks of 16.
LENGTHS = (1, 2, 3, 4, 5, 16, 17, 45, 90)
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "rope": {"position_embedding_type": "rope", "tie_word_embeddings": True, "attention_bias": True},
    "groups": {
        "mamba_n_groups": 3,
        "mamba_d_state": 7,
        "mamba_d_conv": 2,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "experts": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "one expert": {"num_local_experts": 1, "num_experts_per_tok": 1, "intermediate_size": 36, "mamba_n_heads": 4},
    "one head": {"mamba_n_heads": 1, "layer_types": ["attention", "mamba", "attention", "mamba"]},
    "states alone": {"num_hidden_layers": 2, "layer_types": ["mamba", "mamba"]},
}
Find = Callable[[str], Path]


PROMPTS = [random_prompt(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Checkpoints by variant and seed ("dense 1"), and EAGLE-3 heads ("dense 1 head"), each made once."""

    @functools.cache
    def make(name: str) -> Path:
        root = tmp_path_factory.mktemp("granite")
        if name.endswith(" head"):
            return make_drafter(root, "eagle3", make(name.removesuffix(" head")))
        variant, _, seed = name.rpartition(" ")
        return make_granite(root, int(seed), **VARIANTS[variant])

    return make


def settings(model: Path, head: Path | None = None, **more: Any) -> dict[str, Any]:
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    return {
        "model": str(model),
        "speculative_config": SpeculativeConfig.parse(json.dumps(spec)) if head else None,
        "kv_cache_memory": KV_MEMORY,
        "dtype": "float32",
        **more,
    }


@pytest.mark.parametrize(
    "name", ["dense 1", "dense 2", "rope 3", "groups 4", "one head 5", "experts 6", "one expert 7"]
)
def test_greedy_tokens_are_those_of_transformers(name: str, find: Find) -> None:
    model = load_reference(find(name))
    for head in (None, find(f"{name} head")):
        with stepped(**settings(find(name), head, max_num_batched_tokens=40)) as one:
            found = [stream.token_ids for stream in one.all_of(PROMPTS, PARAMS)]
        assert len({tuple(tokens) for tokens in found}) > len(PROMPTS) // 2
        for prompt, got in zip(PROMPTS, found, strict=True):
            assert_greedy(model, prompt, got, NUM_TOKENS)


@pytest.mark.parametrize(
    ("name", "dtype"), [("groups 4", "float32"), ("groups 4", "bfloat16"), ("experts 6", "bfloat16")]
)
def test_neither_chunks_nor_neighbours_nor_drafts_change_a_bit(name: str, dtype: str, find: Find) -> None:
    """Including log-probabilities: of a prompt alone, in a batch, and in chunks of a few rows."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    expected = None
    for head in (None, find(f"{name} head")):
        for rows in (7, 2048):
            with stepped(**settings(find(name), head, dtype=dtype, max_num_batched_tokens=rows)) as one:
                together = [stream.result for stream in one.all_of(PROMPTS, params)]
                alone = [one.all_of([prompt], params)[0].result for prompt in PROMPTS[::4]]
            expected = expected or together
            assert together == expected
            assert alone == expected[::4]


@pytest.mark.parametrize(("name", "drafts"), [("dense 1", True), ("states alone 8", False)])
def test_a_handoff_changes_neither_tokens_nor_acceptance(name: str, drafts: bool, find: Find, tmp_path: Path) -> None:
    """Drafts are rejected and accepted, and the state returns to the last accepted one. A model with only states has no
    pages at all.
    """
    head = find(f"{name} head") if drafts else None
    common = settings(find(name), head, integrity="full", max_num_batched_tokens=32)
    with stepped(**common) as single, pair(tmp_path, {"block_size": 7}, **common) as two:
        two.check_handoffs(single.all_of(PROMPTS, PARAMS), PROMPTS, PARAMS)


def test_the_bytes_of_a_state_do_not_grow_with_the_prompt(find: Find, tmp_path: Path) -> None:
    """One slot per request is sent, never the four scratch slots."""
    spec = load_model(find("dense 1")).kv_layers[0]
    state = 3 * sum(p.num_heads * p.head_dim * 4 for p in spec.planes)  # type: ignore[union-attr]
    assert state == 3 * 4 * (3 * (96 + 12 + 12) + 6 * 12 * 16)
    attention = 2 * 2 * 12 * 4
    with pair(tmp_path, **settings(find("dense 1"), find("dense 1 head"), enable_prefix_caching=False)) as two:
        for length in (5, 45):
            before = two.decode.core.metrics.handoff_bytes
            two.legs(f"{length}", random_prompt(length), PARAMS, "push")
            two.settle()
            head = 2 * 2 * 12 * 4
            assert two.decode.core.metrics.handoff_bytes - before == state + length * (attention + head)


# ---------------------------------------------------------------- prefixes

INTERVAL = 16
CHAT = random_prompt(90)
# Each begins with a part of the one before it.
TURNS = [
    CHAT,
    CHAT[:50] + random_prompt(40, 7),
    CHAT[:50] + random_prompt(40, 7) + random_prompt(9, 8),
    CHAT[:64],
    CHAT[:33],
]


def hybrid(find: Find, **more: Any) -> dict[str, Any]:
    common = {"max_num_batched_tokens": 40, "mamba_block_size": INTERVAL}
    return settings(find("dense 1"), find("dense 1 head"), **{**common, **more})


def without_hits(find: Find, prompts: list[list[int]]) -> list[Stream]:
    with stepped(**hybrid(find, enable_prefix_caching=False)) as one:
        return one.all_of(prompts, PARAMS)


def hits_of(one: Stepped) -> list[int | None]:
    """Record where requests begin to compute from now on."""
    hits: list[int | None] = []
    attach = one.core.cache.attach

    def told(tables: BlockTables, tokens: Sequence[int], num_tokens: int, num_rows: int) -> int | None:
        hits.append(attach(tables, tokens, num_tokens, num_rows))
        return hits[-1]

    one.core.cache.attach = told  # type: ignore[method-assign]
    return hits


def test_a_prompt_goes_on_from_the_last_state_that_it_shares(find: Find) -> None:
    """Tokens, acceptance and bits are those of an engine without prefix caching."""
    expected = without_hits(find, TURNS)
    with stepped(**hybrid(find)) as one:
        for prompt, whole, hit in zip(TURNS, expected, (0, 48, 80, 48, 32), strict=True):
            before = one.core.metrics.num_cached_tokens
            (stream,) = one.all_of([prompt], PARAMS)
            assert (stream.result, stream.accepted) == (whole.result, whole.accepted)
            assert one.core.metrics.num_cached_tokens - before == hit


def test_a_conversation_continues_from_a_state_after_generated_tokens(find: Find) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with stepped(**hybrid(find)) as one:
        (stream,) = one.all_of([CHAT], params)
        longer = CHAT + stream.token_ids + random_prompt(5, 9)
        found = one.all_of([longer], PARAMS)[0]
        assert one.core.metrics.num_cached_tokens == 128
    expected = without_hits(find, [longer])[0]
    assert (found.result, found.accepted) == (expected.result, expected.accepted)


def test_preempted_requests_go_on_from_their_states(find: Find) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [random_prompt(40 + i, 3) for i in range(4)]
    with stepped(**hybrid(find, enable_prefix_caching=False)) as one:
        expected = [stream.result for stream in one.all_of(prompts, params)]
    with stepped(**hybrid(find)) as one:
        pool = one.core.cache.pools["target.full.1"]
        taken, hits = pool.allocate(pool.num_available - 22), hits_of(one)
        streams = [one.add(request(f"{i}", prompt, params)) for i, prompt in enumerate(prompts)]
        while not all(stream.ended for stream in streams):
            one.step()
        pool.release(taken)
        assert one.core.scheduler.num_preemptions
        assert [stream.result for stream in streams] == expected
        assert any(hits), "some began behind their first token"


def test_both_engines_of_a_handoff_go_on_from_states(find: Find, tmp_path: Path) -> None:
    expected = without_hits(find, TURNS)
    with pair(tmp_path, {"block_size": 8}, **hybrid(find, integrity="full")) as two:
        for number, (prompt, whole) in enumerate(zip(TURNS, expected, strict=True)):
            mode: Mode = "push" if number % 2 else "pull"
            _, rest = two.legs(f"{number}", prompt, PARAMS, mode)
            two.settle()
            assert (rest.result, rest.accepted) == (whole.result, whole.accepted)
        assert two.prefill.core.metrics.num_cached_tokens == 48 + 80 + 48 + 32
        # D computes a prompt itself, so that it has the state after it; then P need not send it.
        prompt = random_prompt(64, 5)
        alone = two.decode.run("alone", prompt, PARAMS)
        before = two.decode.core.metrics.handoff_bytes
        _, rest = two.legs("again", prompt, PARAMS, "push")
        two.settle()
        assert (rest.token_ids, rest.accepted) == (alone.token_ids, alone.accepted)
        assert two.decode.core.metrics.handoff_bytes - before == 2 * 2 * 12 * 4, "the drafter's last entry"


def test_a_failed_handoff_is_recomputed_from_a_state_that_d_has(find: Find, tmp_path: Path) -> None:
    transfer = KVTransferConfig(kv_transport="faulty+local://?fault=fail&every=1")
    expected = without_hits(find, [CHAT])[0]
    common = hybrid(find, integrity="full", kv_transfer_config=transfer, recovery="recompute")
    with pair(tmp_path, **common) as two:
        two.decode.run("before", CHAT[:70], PARAMS)
        hits = hits_of(two.decode)
        _, rest = two.legs("r", CHAT, PARAMS, "push")
        two.settle()
        assert two.decode.core.metrics.recoveries["recompute"] == 1
        assert hits == [64]
        assert (rest.token_ids, rest.accepted) == (expected.token_ids, expected.accepted)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_step_limit", [0.1, 0.5]),
        ("position_embedding_type", "alibi"),
        ("mamba_n_groups", 4),
        ("mamba_n_heads", 7),
        ("layer_types", ["mamba", "attention", "mamba", "hyena"]),
        ("hidden_act", "gelu"),
        ("num_experts_per_tok", 3),
    ],
)
def test_unsupported_config_fields_are_refused_by_name(field: str, value: object, find: Find, tmp_path: Path) -> None:
    source = find("dense 1")
    raw = json.loads((source / "config.json").read_text())
    if field == "num_experts_per_tok":
        raw["num_local_experts"] = 2
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file) if file.name != "config.json" else None
    (tmp_path / "config.json").write_text(json.dumps({**raw, field: value}))
    with pytest.raises(CheckpointError, match=field):
        load_model(tmp_path)
