"""The interfaces for latents and states: their results, and that a row's bits do not depend on the batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.latent import PagedLatentAttention
from baton.engine.attention.scan import StateBatch, scan
from baton.engine.memory.group_memory import GroupMemory
from baton.engine.step_plans import StateSlots
from baton.errors import BatonError
from baton.kernels.cpu import omp
from baton.kv.spec import GroupSpec, PlaneSpec, kv_planes, latent_planes
from baton.models.layer_cache import LatentRows, ScanRows, States
from testkit.handoffs.planes import split_latent_planes

HEADS, LATENT, ROPE, LENGTH = 3, 24, 8, 150
NOPE, VALUE = 10, 12
SCALE = 0.2


def rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((LENGTH, HEADS, LATENT + ROPE), (LENGTH, LATENT), (LENGTH, ROPE))
    q, latent, rope = (torch.randn(size, generator=generator) for size in sizes)
    return q, latent, rope


class Pool:
    """Latents of two requests in pages in random order, NaN where nothing was written."""

    def __init__(self, page_size: int = 16, split: bool = False) -> None:
        spec = GroupSpec(
            name="g",
            owner="target",
            kind="mla",
            planes=(split_latent_planes if split else latent_planes)(LATENT, ROPE, "float32"),
            page_size=page_size,
            layer_ids=(0, 1),
        )
        count = -(-LENGTH // page_size)
        self.memory = GroupMemory.zeros(spec, 2 * count + 1, torch.device("cpu"))
        for plane in self.memory.planes:
            plane.fill_(torch.nan)
        pages = np.random.default_rng(0).permutation(np.arange(1, 2 * count + 1, dtype=np.int32))
        self.table = pages.reshape(2, count)

    def attend(self, spans: dict[int, tuple[int, int]], heads: Heads | None = None) -> list[Tensor]:
        """Attend with rows [start, stop) of the requests, side by side."""
        parts = [[part[slice(*span)] for part in rows(r)] for r, span in spans.items()]
        q, latent, rope = (torch.cat(column) for column in zip(*parts, strict=True))
        counts = [stop - start for start, stop in spans.values()]
        positions = np.concatenate([np.arange(*span) for span in spans.values()])
        query_start = np.cumsum([0, *counts]).astype(np.int32)
        batch = AttnBatch(query_start, positions, self.table[list(spans)])
        if heads is not None:
            q = q[..., : NOPE + ROPE]
        out = PagedLatentAttention(self.memory.planes, 1, batch).attend(LatentRows(q, latent, rope, SCALE, heads))
        return list(torch.split(out, counts))


class Heads:
    """`LatentHeads` with random weights, which counts its calls."""

    value_dim = VALUE

    def __init__(self, always_absorbed: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        self.always_absorbed, self.expansions, self.absorbed_rows = always_absorbed, 0, 0
        self.keys = torch.randn(HEADS, NOPE, LATENT, generator=generator)
        self.to_values = torch.randn(HEADS, VALUE, LATENT, generator=generator)

    def expand(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        self.expansions += 1
        latent, rope = kept[:, :LATENT], kept[:, None, LATENT:].expand(-1, HEADS, -1)
        keys = torch.cat((torch.einsum("sc,hnc->shn", latent, self.keys), rope), dim=-1)
        return keys, torch.einsum("sc,hvc->shv", latent, self.to_values)

    def absorb(self, q: Tensor) -> Tensor:
        self.absorbed_rows += len(q)
        return torch.cat((torch.einsum("thn,hnc->thc", q[..., :NOPE], self.keys), q[..., NOPE:]), dim=-1)

    def values(self, latent: Tensor) -> Tensor:
        return torch.einsum("thc,hvc->thv", latent, self.to_values)


def reference(seed: int, heads: Heads | None = None) -> Tensor:
    q, latent, rope = rows(seed)
    kept = torch.cat((latent, rope), dim=-1)
    keys, values = kept[:, None].expand(-1, HEADS, -1), latent[:, None].expand(-1, HEADS, -1)
    if heads is not None:
        q = q[..., : NOPE + ROPE]
        keys, values = heads.expand(kept)
    scores = torch.einsum("thd,shd->hts", q, keys) * SCALE
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_latents_are_attended_to(split: bool, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr("baton.engine.attention.latent.supports", lambda *_: False)
    for out, seed in zip(Pool(split=split).attend({0: (0, LENGTH), 1: (0, LENGTH)}), (0, 1), strict=True):
        torch.testing.assert_close(out, reference(seed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("split", [False, True])
def test_prompts_are_expanded_and_few_rows_absorbed(split: bool) -> None:
    """Also side by side: the first rows of one request, the last rows of another."""
    pool, heads = Pool(split=split), Heads()
    expected = [reference(seed, Heads()) for seed in (0, 1)]
    out = pool.attend({0: (0, LENGTH - 1), 1: (0, LENGTH - 1)}, heads)
    torch.testing.assert_close(out[1], expected[1][:-1], rtol=1e-4, atol=1e-4)
    assert (heads.expansions, heads.absorbed_rows) == (2, 0)
    out = pool.attend({1: (LENGTH - 1, LENGTH), 0: (0, LENGTH)}, heads)
    torch.testing.assert_close(out[0], expected[1][-1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[1], expected[0], rtol=1e-4, atol=1e-4)
    assert (heads.expansions, heads.absorbed_rows) == (3, 1)
    invariant = Heads(always_absorbed=True)
    out = pool.attend({0: (0, LENGTH)}, invariant)
    torch.testing.assert_close(out[0], expected[0], rtol=1e-4, atol=1e-4)
    assert invariant.expansions == 0
    chunk = pool.attend({0: (100, LENGTH)}, heads)
    torch.testing.assert_close(chunk[0], expected[0][100:], rtol=1e-4, atol=1e-4)
    assert heads.expansions == 4, "rows behind others, with a mask"


def test_no_more_is_expanded_than_memory_is_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    size = HEADS * (NOPE + ROPE + Heads().value_dim)
    for most, expansions in ((LENGTH * size, 1), (LENGTH * size - 1, 0)):
        monkeypatch.setattr("baton.engine.attention.latent._MOST_EXPANDED", most)
        heads = Heads()
        out = Pool().attend({0: (0, LENGTH)}, heads)
        torch.testing.assert_close(out[0], reference(0, Heads()), rtol=1e-4, atol=1e-4)
        assert heads.expansions == expansions


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_a_row_of_latents_has_the_same_bits_in_every_batch(page_size: int) -> None:
    whole = Pool().attend({1: (0, LENGTH)})[0]
    pool, edges = Pool(page_size), [0, 1, 3, 20, 84, 85, 147, LENGTH]
    for start, stop in itertools.pairwise(edges):
        # Beside another request's rows, before or after them.
        spans = {0: (start, stop), 1: (start, stop)} if start % 2 else {1: (start, stop), 0: (start, stop)}
        found = dict(zip(spans, pool.attend(spans), strict=True))[1]
        assert torch.equal(found, whole[start:stop]), (start, stop)


def test_rows_of_latents_are_shared_among_threads_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    teams: list[int] = []
    count = omp.threads_for
    monkeypatch.setattr("baton.engine.attention.latent_cpu._PARALLEL_WORK", 1 << 10)
    monkeypatch.setattr(
        "baton.engine.attention.latent_cpu.threads_for", lambda *work: teams.append(count(*work)) or teams[-1]
    )
    found, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(Pool(split=True).attend({0: (0, LENGTH), 1: (0, 97)}))
        finally:
            torch.set_num_threads(before)
    assert teams == [1, 2]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_latents_go_to_no_slot_that_is_not_there() -> None:
    pool = Pool()
    pool.table[1, 4] = 0
    with pytest.raises(BatonError, match="null page"):
        pool.attend({0: (0, 70), 1: (0, 70)})
    assert all(plane.isnan().all() for plane in pool.memory.planes), "slots are checked before any is written"
    pool.table = pool.table[:, :2]
    with pytest.raises(BatonError, match="null page"):
        pool.attend({0: (32, 33)})


STATE = GroupSpec(
    name="s",
    owner="target",
    kind="state",
    planes=(PlaneSpec("conv", "bfloat16", 3, 2, "channels"), PlaneSpec("ssm", "float32", 2, 5)),
    page_size=1,
    layer_ids=(0, 1, 2),
)


def slots(read: list[int], kept: list[int], write: list[int]) -> StateSlots:
    return StateSlots(np.array(read), np.array(kept), np.array(write))


def count(states: States, rows: ScanRows) -> tuple[Tensor, States]:
    """Adds up the rows in the state; outputs the state that was read."""
    conv, ssm = states
    lengths = np.diff(rows.query_start)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    within = torch.from_numpy(np.arange(len(owner)) - rows.query_start[owner] + 1)[:, None, None]
    after = ssm[owner] + within
    return ssm[owner][:, 0, 0] + conv[owner][:, 0, 0].float(), (conv[owner][rows.kept] + 1, after[rows.kept])


def test_states_are_read_and_written_by_slots() -> None:
    memory = GroupMemory.zeros(STATE, 9, torch.device("cpu"))
    for plane in memory.planes:
        plane[0] = torch.nan  # at the start of a request nothing is read
    first = StateBatch(np.array([0, 3, 4], np.int32), slots([0, 0], [2, 3], [4, 7]))
    assert scan(memory.planes, 1, first, count).tolist() == [0, 0, 0, 0]
    conv, ssm = memory.planes
    assert ssm[:, 1, 0, 0, 0].nan_to_num().tolist() == [0, 0, 0, 0, 3, 0, 0, 1, 0]
    assert conv[[4, 7], 1].eq(1).all()
    assert not ssm[1:, [0, 2]].any(), "other layers are as they were"
    # A verification of three rows keeps the state after each, and the one before them.
    scan(memory.planes, 1, StateBatch(np.array([0, 3], np.int32), slots([4], [0, 1, 2], [1, 2, 3])), count)
    assert ssm[1:5, 1, 0, 1, 4].tolist() == [4, 5, 6, 3]


@pytest.mark.parametrize(
    ("read", "write"), [([4], [0]), ([4], [9]), ([9], [1]), ([4], [4]), ([4], [-1]), ([-1], [1]), ([4, 4], [1])]
)
def test_slots_that_are_wrong_change_no_state(read: list[int], write: list[int]) -> None:
    memory = GroupMemory.zeros(STATE, 9, torch.device("cpu"))
    with pytest.raises(BatonError, match="scan"):
        scan(memory.planes, 0, StateBatch(np.array([0, 1], np.int32), slots(read, [0], write)), count)
    assert not memory.pages.any()


def test_states_of_another_shape_are_written_nowhere() -> None:
    """One state for two rows, or one that would have to be broadcast, is a bug of the model."""
    memory = GroupMemory.zeros(STATE, 9, torch.device("cpu"))
    batch = StateBatch(np.array([0, 2], np.int32), slots([0], [0, 1], [1, 2]))
    with pytest.raises(BatonError, match="over another"):
        scan(memory.planes, 0, StateBatch(np.array([0, 2], np.int32), slots([0], [0, 1], [3, 3])), count)
    for shape in ((1, 2, 5), (2, 2, 1), (2, 1, 5)):

        def stretched(states: States, rows: ScanRows, shape: tuple[int, ...] = shape) -> tuple[Tensor, States]:
            return torch.zeros(2), (torch.ones(2, 3, 2), torch.ones(shape))

        with pytest.raises(BatonError, match="shape"):
            scan(memory.planes, 0, batch, stretched)
    assert not memory.pages.any()


def test_planes_are_views_of_the_pages_as_the_geometry_says() -> None:
    memory = GroupMemory.zeros(STATE, 4, torch.device("cpu"))
    memory.planes[0][2, 1, 0, 1, 1] = 1.5
    memory.planes[1][3, 2, 0, 1, 4] = 2.5
    layer = STATE.plane_offsets[-1]
    assert memory.pages[2, layer + 6 : layer + 8].view(torch.bfloat16).item() == 1.5
    assert memory.pages[3, -4:].view(torch.float32).item() == 2.5
    assert memory.pages.count_nonzero() == 2 + 2
    assert memory.kv is None
    ordinary = GroupSpec(
        name="g", owner="target", kind="full", planes=kv_planes(2, 4, "bfloat16"), page_size=3, layer_ids=(0,)
    )
    both = GroupMemory.zeros(ordinary, 4, torch.device("cpu"))
    assert both.kv is not None
    both.planes[1][1, 0, 2, 1] = 7
    assert both.kv[1, 0, 1, 2, 1].eq(7).all()
