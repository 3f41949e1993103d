"""KV in GPU memory: vLLM's layouts there, on host tensors of the same shapes and strides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from baton.handoff.plan.planner import plan_copies
from baton.kv.interval import Interval, Kind
from baton.transports.base import DeviceMemory
from baton.vllm import compat
from baton.vllm.memory.geometry import CacheLayout, describe_caches, region_of
from baton.vllm.memory.groups import CacheTable, split_tables

LAYERS, BLOCKS, HEADS, DIM = 3, 9, 4, 8
# vLLM's nesting of layers, blocks, heads, tokens and an entry's content (K, then V) in memory.
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
NAMES = tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS))


def gpu_cache(layout: str, block_size: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Any]:
    """One buffer, and the views `[blocks, heads, tokens, 2 * dim]` of it that vLLM registers."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": block_size, "C": 2 * DIM}
    buffer = torch.zeros([sizes[axis] for axis in layout], dtype=dtype)
    return buffer, dict(zip(NAMES, buffer.permute([layout.index(axis) for axis in "LBHNC"]), strict=True))


def described(caches: dict[str, torch.Tensor], block_size: int, kind: Kind = "full") -> CacheLayout:
    table = CacheTable(0, kind, None, block_size, NAMES)
    return describe_caches(caches, split_tables([table], LAYERS - 1), dict.fromkeys(NAMES, "tokens"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("source_size", "dest_size"), [(16, 16), (16, 48), (32, 16)])
@pytest.mark.parametrize("tokens", [1, 16, 33, 47])
def test_tokens_arrive_in_any_layout(layout: str, source_size: int, dest_size: int, tokens: int) -> None:
    source_buffer, source = gpu_cache(layout, source_size)
    dest_buffer, dest = gpu_cache("LBNHC", dest_size)
    expected_buffer, expected = gpu_cache("LBNHC", dest_size)
    source_table, dest_table = [7, 2, 5], [3, 8, 4]
    generator = torch.Generator().manual_seed(1)
    source_buffer[:] = torch.randn(source_buffer.shape, generator=generator)
    for name in NAMES:
        for token in range(tokens):
            entry = source[name][source_table[token // source_size], :, token % source_size]
            expected[name][dest_table[token // dest_size], :, token % dest_size] = entry
    have, want = described(source, source_size), described(dest, dest_size)
    memory = [torch.as_tensor(layout.regions[0]) for layout in (have, want)]
    assert set(have.geometries) == {"target.full.0", "draft.full.0"}
    for name in have.geometries:
        lists = plan_copies(
            [have.geometries[name]], want.geometries[name], source_table, dest_table, Interval(0, tokens)
        )
        for copies in lists.values():
            for start, end, nbytes in zip(copies.source_offset, copies.dest_offset, copies.nbytes, strict=True):
                memory[1][end : end + nbytes] = memory[0][start : start + nbytes]
    assert dest_buffer.any()
    assert torch.equal(dest_buffer, expected_buffer)


def test_a_block_whose_tokens_lie_together_is_one_run() -> None:
    _, caches = gpu_cache("LBNHC", 16)
    geometry = described(caches, 16).geometries["draft.full.0"]
    (copies,) = plan_copies([geometry], geometry, [1, 2], [3, 4], Interval(0, 32)).values()
    assert list(copies.nbytes) == [2 * 16 * HEADS * 2 * DIM * 2]


def test_a_devices_memory_is_taken_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    storage: Any = SimpleNamespace(device=torch.device("cuda", 1), data_ptr=lambda: 4096, nbytes=lambda: 640)
    memory = region_of(storage)
    assert isinstance(memory, DeviceMemory)
    assert (memory.address, memory.nbytes, memory.device) == (4096, 640, 1)
    memory.enter()
    assert current == [1]
    with pytest.raises(ConfigError, match="this is on xpu"):
        region_of(SimpleNamespace(device=torch.device("xpu", 0)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 1)])
def test_only_a_gpu_is_waited_for(device: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    compat.wait_for_device(SimpleNamespace(device_config=SimpleNamespace(device_type=device)))
    assert len(waited) == waits
