"""Slots of Mamba-2 states and of delta nets, which vLLM's tensor ranks share by heads, by channels, or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baton.errors import ConfigError, ProtocolError
from baton.handoff.plan.planner import plan_copies
from baton.kv.interval import Interval
from baton.vllm.memory.geometry import CacheLayout, WorkerHeads, describe_caches
from baton.vllm.memory.groups import CacheTable, split_tables
from baton.vllm.memory.states import DeltaState, Mamba2State

HEADS, HEAD_DIM, STATE, INPUTS = 8, 4, 6, 3
INNER, PADDING, SLOTS = HEADS * HEAD_DIM, 40, 7
KEYS = 2 * STATE
DTYPES = (torch.bfloat16, torch.float32)
LAYERS = tuple(f"model.layers.{number}.mamba" for number in (0, 2))
KV_HEADS = WorkerHeads(0, 1, {"target": 2, "draft": 2}).num_kv_heads


class Rank:
    """The state layers of one of `size` tensor ranks as vLLM cuts them: a model of `groups` groups."""

    def __init__(self, rank: int, size: int, groups: int, channels_first: bool) -> None:
        self.rank, self.size, self.groups, self.channels_first = rank, size, groups, channels_first
        self.groups_here = max(groups // size, 1)
        channels = INNER // size + 2 * self.groups_here * STATE
        conv = (channels, INPUTS) if channels_first else (INPUTS, channels)
        self.shapes = (conv, (HEADS // size, HEAD_DIM, STATE))
        self.parts = Mamba2State(rank, self.shapes, DTYPES, groups, self.groups_here, STATE, channels_first).parts()
        self.state_bytes = 2 * channels * INPUTS + 4 * INNER // size * STATE
        # As vLLM allocates it: a tensor of bytes per layer, with slots padded to the pages of attention layers.
        self.memory = torch.zeros(len(LAYERS), SLOTS, 1, 1, self.state_bytes + PADDING, dtype=torch.int8)
        self.caches = dict(zip(LAYERS, self.memory, strict=True))

    def describe(self) -> CacheLayout:
        groups = split_tables([CacheTable(0, "state", None, 1, LAYERS)], num_target_layers=3)
        worker = WorkerHeads(self.rank, self.size, KV_HEADS)
        states = dict.fromkeys(LAYERS, self.parts)
        return describe_caches(self.caches, groups, dict.fromkeys(LAYERS, "tokens"), worker=worker, states=states)

    def fill(self, slot: int, states: Sequence[Sequence[torch.Tensor]]) -> None:
        """Write this rank's part of x `[channels, inputs]`, B, C, and of the recurrent state `[heads, dim, state]`."""
        for layer, (x, b, c, recurrent) in zip(LAYERS, states, strict=True):
            both = [each if self.groups == 1 else each.chunk(self.size)[self.rank] for each in (b, c)]
            conv = torch.cat([x.chunk(self.size)[self.rank], *both])
            conv = (conv if self.channels_first else conv.T).contiguous()
            heads = recurrent.chunk(self.size)[self.rank].contiguous()
            content = torch.cat([conv.flatten().view(torch.int8), heads.flatten().view(torch.int8)])
            self.caches[layer][slot, 0, 0, : self.state_bytes] = content


class DeltaRank(Rank):
    """The same for delta nets: q, k and v in place of x, B and C, all shared."""

    def __init__(self, rank: int, size: int, channels_first: bool) -> None:
        super().__init__(rank, size, 2, channels_first)
        self.parts = DeltaState(rank, self.shapes, DTYPES, KEYS // size, channels_first).parts()


class CutAsMamba(DeltaRank):
    """Cuts a delta net's state as Mamba-2's: x before B and C, of which every rank has all."""

    def __init__(self, rank: int, size: int, channels_first: bool) -> None:
        super().__init__(rank, size, channels_first)
        self.parts = Mamba2State(rank, self.shapes, DTYPES, 1, 1, KEYS // size, channels_first).parts()


def random_states(groups: int, conv: Sequence[int] = ()) -> list[list[torch.Tensor]]:
    conv = conv or (INNER, groups * STATE, groups * STATE)
    return [
        [*(torch.randn(size, INPUTS).bfloat16() for size in conv), torch.randn(HEADS, HEAD_DIM, STATE)] for _ in LAYERS
    ]


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize(
    ("groups", "sources", "dests"), [(1, 2, 1), (1, 1, 2), (1, 4, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
)
def test_each_rank_gets_its_part_of_a_state(groups: int, sources: int, dests: int, channels_first: bool) -> None:
    have = [Rank(rank, sources, groups, channels_first) for rank in range(sources)]
    want, right = ([Rank(rank, dests, groups, channels_first) for rank in range(dests)] for _ in range(2))
    check_move(have, want, right, random_states(groups))


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize(("sources", "dests"), [(1, 2), (2, 1), (2, 2)])
def test_each_rank_gets_its_heads_of_a_delta_nets_state(sources: int, dests: int, channels_first: bool) -> None:
    have = [DeltaRank(rank, sources, channels_first) for rank in range(sources)]
    want, right = ([DeltaRank(rank, dests, channels_first) for rank in range(dests)] for _ in range(2))
    check_move(have, want, right, random_states(2, (KEYS, KEYS, INNER)))


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize(
    ("sources", "dests", "why"),
    [(1, 2, "other bytes"), (2, 1, "nobody holds layer 0 head 6 of plane 'conv.B'")],
)
def test_a_delta_nets_state_that_is_cut_as_mambas_is_found(
    sources: int, dests: int, why: str, channels_first: bool
) -> None:
    have = [CutAsMamba(rank, sources, channels_first) for rank in range(sources)]
    want, right = ([CutAsMamba(rank, dests, channels_first) for rank in range(dests)] for _ in range(2))
    with pytest.raises((AssertionError, ProtocolError), match=why):
        check_move(have, want, right, random_states(2, (KEYS, KEYS, INNER)))


def check_move(have: Sequence[Rank], want: Sequence[Rank], right: Sequence[Rank], states: list[Any]) -> None:
    for rank in have:
        rank.fill(3, states)
    for rank in right:
        rank.fill(5, states)
    layouts = [rank.describe() for rank in have]
    moved = 0
    for rank in want:
        into = rank.describe()
        (name,) = into.geometries
        geometries = [layout.geometries[name] for layout in layouts]
        for sender, copies in plan_copies(geometries, into.geometries[name], [3], [5], Interval(0, 1)).items():
            moved += copies.total
            for start, end, count in zip(copies.source_offset, copies.dest_offset, copies.nbytes, strict=True):
                into.regions[0][end : end + count] = layouts[sender].regions[0][start : start + count]
    same = [torch.equal(found.memory, expected.memory) for found, expected in zip(want, right, strict=True)]
    assert all(same), "other bytes"
    assert moved == sum(rank.state_bytes for rank in want) * len(LAYERS)  # each byte once, and no padding


def test_a_state_between_equal_engines_is_one_run_a_layer() -> None:
    layout = Rank(0, 1, groups=2, channels_first=True).describe()
    (geometry,) = layout.geometries.values()
    copies = plan_copies([geometry], geometry, [3], [5], Interval(0, 1))[0]
    assert len(copies) == len(LAYERS)


def test_states_that_are_not_known() -> None:
    with pytest.raises(ConfigError, match=r"a state of shapes \[\(4, 3\)\] is not known"):
        Mamba2State(0, [(4, 3)], [torch.float32], 1, 1, STATE, True).parts()
    two, other = Rank(1, 2, 1, True), Rank(1, 2, 2, True)

    groups = split_tables([CacheTable(0, "state", None, 1, LAYERS)], num_target_layers=3)
    kernels, worker = dict.fromkeys(LAYERS, "tokens"), WorkerHeads(1, 2, KV_HEADS)
    with pytest.raises(ConfigError, match="of Qwen's delta nets are cut over tensor ranks"):
        describe_caches(two.caches, groups, kernels, worker=worker)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="states of several shapes"):
        describe_caches(other.caches, groups, kernels, worker=worker, states={LAYERS[0]: other.parts})  # type: ignore[arg-type]
