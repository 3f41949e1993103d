"""The size of the KV pool: a fair share of free memory, no more than is used, and a context that fits into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import baton.engine.memory.pool_size as pool_size_module
from baton import LLM, SamplingParams
from baton.engine.config import EngineConfig, parse_size
from baton.engine.memory.group_memory import GroupMemory
from baton.engine.memory.pool_size import MIN_POOL_BYTES, Demand, Memory, PoolSize, pool_size
from baton.errors import ConfigError
from baton.kv.spec import GroupSpec, PlaneSpec, kv_planes
from testkit.engines import EAGLE3, TARGET
from testkit.inside import engine_of

GIB = 1 << 30
PAGE_BYTES = 2 << 20  # 16 tokens of an 8 B model
CONTEXT = 8192


def group(name: str, page_bytes: int = PAGE_BYTES, page_size: int = 16) -> GroupSpec:
    """Pages of that many bytes; K and V, one byte per element."""
    return GroupSpec(
        name=name,
        owner="target",
        kind="full",
        planes=kv_planes(1, page_bytes // (2 * page_size), "uint8"),
        page_size=page_size,
        layer_ids=(0,),
    )


def size(
    free: int = 64 * GIB,
    weights: int = 0,
    shm_free: int | None = None,
    page_bytes: int = PAGE_BYTES,
    max_position: int = CONTEXT,
    **settings: Any,
) -> PoolSize:
    before = Memory(free, GIB, shm_free)
    now = Memory(free - weights, GIB + weights, shm_free)
    return pool_size(EngineConfig(model=TARGET, **settings), before, now, [group("kv", page_bytes)], 3, max_position)


def num_bytes(found: PoolSize, page_bytes: int = PAGE_BYTES) -> int:
    return found.num_pages["kv"] * page_bytes


def test_a_share_of_what_is_free_less_the_weights() -> None:
    alone = size(free=20 * GIB, weights=4 * GIB)
    assert num_bytes(alone) == pytest.approx(8 * GIB, rel=0.01)  # 0.6 * 20 - 4
    assert str(alone) == f"KV holds {(alone.num_pages['kv'] - 1) * 16} tokens, context {CONTEXT}"
    of_two = size(free=20 * GIB, weights=4 * GIB, engines_per_host=2)
    assert num_bytes(of_two) == pytest.approx(2 * GIB, rel=0.01)
    more = size(free=20 * GIB, weights=4 * GIB, engines_per_host=2, gpu_memory_utilization=0.9)
    assert num_bytes(more) == pytest.approx(5 * GIB, rel=0.01)
    small_shm = size(free=20 * GIB, weights=4 * GIB, shm_free=5 * GIB, engines_per_host=2)
    assert num_bytes(small_shm) == pytest.approx(1.5 * GIB, rel=0.01)


def test_engines_that_start_at_once_take_what_the_others_left() -> None:
    """Both saw all free memory before they loaded; the first one has used a part of it since."""
    config, before = EngineConfig(model=TARGET), Memory(20 * GIB, GIB, 8 * GIB)
    now = Memory(20 * GIB, GIB, 3 * GIB)
    assert num_bytes(pool_size(config, before, now, [group("kv")], 3, CONTEXT)) == pytest.approx(1.8 * GIB, rel=0.01)
    now = Memory(5 * GIB, GIB, 8 * GIB)
    assert num_bytes(pool_size(config, before, now, [group("kv")], 3, CONTEXT)) == pytest.approx(3 * GIB, rel=0.01)


def test_no_more_than_is_used() -> None:
    """64 sequences of a quarter of the context; a small model keeps at least a small pool."""
    assert num_bytes(size(free=1000 * GIB)) == pytest.approx(64 * CONTEXT / 4 / 16 * PAGE_BYTES, rel=0.01)
    assert num_bytes(size(free=1000 * GIB, max_num_seqs=1)) == pytest.approx(CONTEXT / 16 * PAGE_BYTES, rel=0.01)
    assert num_bytes(size(page_bytes=1 << 10), 1 << 10) == MIN_POOL_BYTES


def test_the_context_is_what_fits() -> None:
    lowered = size(kv_cache_memory=100 * PAGE_BYTES)
    assert (lowered.num_tokens, lowered.max_model_len) == (99 * 16, 99 * 16 - 3)
    assert "more of the model's context needs more --kv-cache-memory" in str(lowered)
    with pytest.raises(ConfigError, match="the greatest --max-model-len that fits is 1581") as refused:
        size(kv_cache_memory=100 * PAGE_BYTES, max_model_len=4096)
    assert refused.value.field == "max_model_len"
    assert size(kv_cache_memory=100 * PAGE_BYTES, max_model_len=1581).max_model_len == 1581
    # Also from the memory share alone: 1.5 GiB after the weights.
    assert size(free=4 * GIB, weights=2 * GIB, kv_cache_memory=None).max_model_len < CONTEXT


def test_groups_with_pages_of_other_sizes_share_the_memory_by_tokens() -> None:
    groups = [group("a", 160, 16), group("b", 400, 10), group("c", 64, 32)]
    for num_bytes in (0, 623, 624, 5000, 123_456):
        _, pages = Demand(groups).split(num_bytes)
        held = {g.name: (pages[g.name] - 1) * g.page_size for g in groups}
        tokens = min(held.values())
        assert all(pages[g.name] - 1 == -(-tokens // g.page_size) for g in groups), "no page that the others cannot use"
        if num_bytes >= 624:
            assert sum(pages[g.name] * g.page_bytes for g in groups) <= num_bytes
            more = sum((1 + -(-(tokens + 1) // g.page_size)) * g.page_bytes for g in groups)
            assert more > num_bytes
    assert Demand(groups).split(0)[1] == {"a": 1, "b": 1, "c": 1}
    assert Demand([group("a", 160), group("b", 64)]).split(224 * 7 + 223)[1] == {"a": 7, "b": 7}


@given(st.integers(0, 4), st.integers(2, 400), st.integers(1, 9), st.integers(0, 60_000))
def test_states_get_slots_for_the_requests_that_the_pages_are_for(
    num_drafts: int, context: int, max_num_seqs: int, num_bytes: int
) -> None:
    plane = PlaneSpec("ssm", "float32", 2, 25)
    state = GroupSpec(name="s", owner="target", kind="state", planes=(plane,), page_size=1, layer_ids=(1,))
    demand = Demand([group("kv", 64, 16), state], num_drafts, context, max_num_seqs)
    tokens, pages = demand.split(num_bytes)
    num_seqs, rest = divmod(pages["s"] - 1, num_drafts + 2)
    assert rest == 0, "a slot, and what a verification of it writes"
    assert num_seqs <= max_num_seqs
    assert (num_seqs > 0) is (tokens > 0)
    used = pages["kv"] * 64 + pages["s"] * 200
    if tokens:
        assert used <= num_bytes
        assert demand.num_bytes(tokens + 1) > num_bytes
    # One context fits before a second request gets slots; beyond that, slots take as much memory as pages.
    more = (pages["kv"] - 1 - -(-(context + num_drafts) // 16)) * 64
    if tokens:
        assert num_seqs == min(max_num_seqs, 1 + max(0, more) // (200 * (num_drafts + 2)))
    assert demand.split(num_bytes + 1000)[1]["s"] >= pages["s"]


@pytest.mark.parametrize("num_bytes", [10_000, 123_456, 1_000_000])
def test_a_long_context_that_nobody_asked_for_leaves_slots_for_many_requests(num_bytes: int) -> None:
    """With prefix caching, also a checkpoint slot per request."""
    plane = PlaneSpec("ssm", "float32", 2, 25)
    state = GroupSpec(name="s", owner="target", kind="state", planes=(plane,), page_size=1, layer_ids=(1,))
    demand = Demand([group("kv", 64, 16), state], 3, 1_000_000, 64, needs_context=False, checkpoints=1)
    _, pages = demand.split(num_bytes)
    slots = (pages["s"] - 1) // 6
    assert slots == min(64, (pages["kv"] - 1) * 64 // (6 * 200))
    assert demand.split(num_bytes)[1] != Demand(demand.groups, 3, 1_000_000, 64, checkpoints=1).split(num_bytes)[1]
    assert num_bytes * 0.8 < pages["kv"] * 64 + pages["s"] * 200 <= num_bytes


@pytest.mark.parametrize(
    ("directory", "limit", "usage", "prefix", "process"),
    [
        ("", "memory.max", "memory.current", "", "0::/"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "4:memory:/"),
        ("", "memory.max", "memory.current", "", "0::/not/in/this/namespace"),
        ("system.slice/x:y", "memory.max", "memory.current", "", "0::/system.slice/x:y"),
        ("system.slice", "memory.max", "memory.current", "", "0::/system.slice/x.service/worker"),
        ("memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "4:memory:/a/b\n0::/"),
    ],
)
def test_a_cgroups_limit_holds_and_files_that_were_read_take_no_memory_of_it(
    tmp_path: Path, directory: str, limit: str, usage: str, prefix: str, process: str
) -> None:
    """A checkpoint that was loaded before stays in the page cache, and counts as used there."""
    own = tmp_path / "self"
    own.write_text(process)
    group = tmp_path / "cgroup" / directory
    group.mkdir(parents=True)
    for name, text in (
        (limit, "8000000\n"),
        (usage, "7900000\n"),
        ("memory.stat", f"anon 900000\n{prefix}inactive_file 4000000\n{prefix}active_file 3000000\n"),
    ):
        (group / name).write_text(text)
    assert pool_size_module._host_free(tmp_path / "cgroup", own) == 7_100_000
    (group / limit).write_text("max\n")
    assert pool_size_module._host_free(tmp_path / "cgroup", own) > 7_100_000


def test_pages_that_cannot_be_allocated_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_memory: needs \d+ bytes for kv, which cannot be allocated: "):
        GroupMemory.zeros(group("kv"), 1 << 36, torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "field", "text"),
    [
        ({"kv_cache_memory": PAGE_BYTES}, "kv_cache_memory", "must be at least 4194304 bytes"),
        ({"free": GIB, "weights": GIB}, "kv_cache_memory", "must be at least"),
        ({"kv_cache_memory": 2 * GIB, "shm_free": GIB}, "kv_cache_memory", "/dev/shm has 1073741824 left"),
    ],
)
def test_too_little_memory_is_refused_with_the_reason(settings: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        size(**settings)
    assert refused.value.field == field


def test_sizes_are_read_as_vllm_reads_them() -> None:
    sizes = {
        "123": 123,
        "2G": 2 * GIB,
        "2GiB": 2 * GIB,
        "2g": 2 * 10**9,
        "512M": GIB // 2,
        "1.5k": 1500,
        "1T": GIB << 10,
    }
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "G", "-1", "2X", "1e9", "2 G"])
def test_a_malformed_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory: must be bytes, or a size such as 512M or 2G"):
        parse_size(text)


def test_a_request_may_have_all_of_the_context_and_the_start_says_how_much() -> None:
    """A chat request without `max_tokens` asks for exactly that."""
    page_bytes = 16 * 2 * 4 * 32 * 2 * 5
    with LLM(TARGET, speculative_config=EAGLE3, kv_cache_memory=10 * page_bytes, batch_invariant=True) as llm:
        context = engine_of(llm).info.max_model_len
        assert context == 9 * 16 - 3
        prompt = list(range(5, 45))
        params = SamplingParams(max_tokens=context - len(prompt), temperature=0.0, ignore_eos=True)
        found = llm.generate([prompt, prompt], params)
        assert [len(one.outputs[0].token_ids) for one in found] == [context - len(prompt)] * 2
