"""Both attention backends against a plain reference; the paged kernel's rows bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.registry import BACKENDS, get_backend
from baton.errors import BatonError, ConfigError
from baton.kernels.cpu import omp
from baton.models.layer_cache import AttnRows

pytestmark = pytest.mark.usefixtures("one_thread")
# The CUDA backend is tested in `test_attention_cuda.py`.
ON_CPU = sorted(BACKENDS.keys() - {"triton"})
LAYERS, LAYER = 3, 1


def random_qkv(tokens: int, heads: int, groups: int, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, size), (tokens, groups, size), (tokens, groups, size))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Float64 attention of a whole sequence, [T, H, D]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(repeat, 1), v.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    i = torch.arange(len(q))
    visible = i[None, :] <= i[:, None]
    if window is not None:
        visible &= i[None, :] > i[:, None] - window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class Pool:
    """Pages of several requests in one region that is NaN until written."""

    def __init__(self, groups: int, size: int, page_size: int, lengths: list[int], dtype: torch.dtype) -> None:
        self.page_size = page_size
        per_request = max(-(-n // page_size) for n in lengths)
        pages = per_request * len(lengths)
        self.kv = torch.full((pages + 1, LAYERS, 2, page_size, groups, size), float("nan"), dtype=dtype)
        ids = np.random.default_rng(0).permutation(np.arange(1, pages + 1)).astype(np.int32)
        self.table = ids.reshape(len(lengths), per_request)

    def batch(self, spans: dict[int, tuple[int, int]]) -> AttnBatch:
        counts = [stop - start for start, stop in spans.values()]
        positions = np.concatenate([np.arange(start, stop) for start, stop in spans.values()])
        return AttnBatch(np.cumsum([0, *counts]).astype(np.int32), positions, self.table[list(spans)])


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("window", [None, 1, 7, 64, 100])
@pytest.mark.parametrize(("heads", "groups", "size", "page_size"), [(4, 2, 16, 16), (6, 1, 20, 7), (3, 3, 10, 1)])
def test_equals_the_reference(
    name: str, window: int | None, heads: int, groups: int, size: int, page_size: int
) -> None:
    tokens = 201
    q, k, v = random_qkv(tokens, heads, groups, size, seed=1)
    pool = Pool(groups, size, page_size, [tokens], torch.float32)
    backend = get_backend(name, "cpu")
    expected = naive(q, k, v, 0.3, window)
    for start, stop in [(0, 130), (130, 131), (131, 201)]:
        rows = slice(start, stop)
        out = backend.write_and_attend(
            pool.kv, LAYER, AttnRows(q[rows], k[rows], v[rows], 0.3), pool.batch({0: (start, stop)}), window
        )
        torch.testing.assert_close(out.double(), expected[rows], rtol=1e-5, atol=2e-6)
    # Nothing else was written: not other layers, the null page or free slots.
    assert pool.kv[:, [0, 2]].isnan().all()
    assert pool.kv[0].isnan().all()
    assert int((~pool.kv.isnan()).sum()) == 2 * tokens * groups * size


@pytest.mark.parametrize("name", ON_CPU)
def test_bfloat16_is_close_to_float64_and_writes_its_slots(name: str) -> None:
    q, k, v = (tensor.bfloat16() for tensor in random_qkv(90, 4, 2, 32, seed=2))
    pool = Pool(2, 32, 16, [90], torch.bfloat16)
    out = get_backend(name, "cpu").write_and_attend(
        pool.kv, LAYER, AttnRows(q, k, v, 0.2), pool.batch({0: (0, 90)}), None
    )
    assert out.dtype is torch.bfloat16
    # Scores and sums are float32 with any instruction set; only the output is rounded.
    tolerances = {"rtol": 2**-8, "atol": 1e-5} if name == "paged_cpu" else {"rtol": 1e-2, "atol": 2e-2}
    torch.testing.assert_close(out.double(), naive(q, k, v, 0.2, None), **tolerances)
    page, slot = int(pool.table[0, 2]), 35 - 32
    assert torch.equal(pool.kv[page, LAYER, 0, slot], k[35])
    assert torch.equal(pool.kv[page, LAYER, 1, slot], v[35])


@pytest.mark.parametrize("name", ON_CPU)
def test_rows_without_keys_attend_to_what_is_there_and_write_nothing(name: str) -> None:
    q, k, v = random_qkv(90, 4, 2, 16, seed=5)
    pool, backend = Pool(2, 16, 7, [90], torch.float32), get_backend(name, "cpu")
    for window in (None, 20):
        first = backend.write_and_attend(pool.kv, LAYER, AttnRows(q, k, v, 0.2), pool.batch({0: (0, 90)}), window)
        before, batch = pool.kv.clone(), pool.batch({0: (30, 71)})
        # Queries as a joint projection leaves them.
        rows = torch.cat((q, q), dim=1)[30:71, :4]
        again = backend.write_and_attend(pool.kv, LAYER, AttnRows(rows, None, None, 0.2), batch, window)
        torch.testing.assert_close(again, first[30:71])
        assert torch.equal(pool.kv.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", ON_CPU)
def test_large_scores_do_not_overflow(name: str) -> None:
    q, k, v = random_qkv(70, 2, 1, 8, seed=3)
    pool = Pool(1, 8, 16, [70], torch.float32)
    out = get_backend(name, "cpu").write_and_attend(
        pool.kv, LAYER, AttnRows(q * 100, k * 100, v, 1.0), pool.batch({0: (0, 70)}), None
    )
    torch.testing.assert_close(out.double(), naive(q * 100, k * 100, v, 1.0, None), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
# Multiples of 32: instructions for bfloat16, if the CPU has them. With AMX 4, 8 and more queries of a key differ.
@pytest.mark.parametrize(("heads", "size"), [(4, 16), (4, 20), (4, 32), (2, 64), (14, 96), (18, 32)])
def test_paged_rows_are_equal_to_the_bit(dtype: torch.dtype, window: int | None, heads: int, size: int) -> None:
    """With any chunks, batch neighbours, page size, page order and number of threads."""
    lengths, groups = [170, 1, 64, 129], 2
    data = [tuple(t.to(dtype) for t in random_qkv(n, heads, groups, size, seed=n)) for n in lengths]
    backend = get_backend("paged_cpu", "cpu")

    def run(page_size: int, schedule: list[dict[int, tuple[int, int]]]) -> list[Tensor]:
        pool = Pool(groups, size, page_size, lengths, dtype)
        out = [torch.full((n, heads, size), float("nan"), dtype=dtype) for n in lengths]
        for spans in schedule:
            q, k, v = (torch.cat([data[r][part][a:b] for r, (a, b) in spans.items()]) for part in range(3))
            rows = backend.write_and_attend(pool.kv, LAYER, AttnRows(q, k, v, 0.25), pool.batch(spans), window)
            for (r, (a, b)), part in zip(spans.items(), rows.split([b - a for a, b in spans.values()]), strict=True):
                out[r][a:b] = part
        return out

    whole = run(16, [{r: (0, n)} for r, n in enumerate(lengths)])
    together = run(16, [dict(enumerate((0, n) for n in lengths))])
    singles = run(7, [{r: (i, i + 1)} for r, n in enumerate(lengths) for i in range(n)])
    few = [
        run(16, [{r: (i, min(i + rows, n))} for r, n in enumerate(lengths) for i in range(0, n, rows)])
        for rows in (2, 5)
    ]
    mixed = run(
        5,
        [
            {0: (0, 2), 2: (0, 33)},
            {3: (0, 128), 0: (2, 66)},
            {1: (0, 1), 3: (128, 129), 0: (66, 67), 2: (33, 64)},
            {0: (67, 170)},
        ],
    )
    assert [
        other
        for other in (together, singles, *few, mixed)
        if not all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    ] == []


@pytest.mark.parametrize("runtime", ["of PyTorch", "none"])
def test_threads_change_no_bit(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime == "none":
        monkeypatch.setattr(omp, "gomp_parallel", lambda: None)
    teams: list[int] = []
    count = omp.threads_for
    monkeypatch.setattr(
        "baton.engine.attention.paged_cpu.threads_for", lambda *work: teams.append(count(*work)) or teams[-1]
    )
    q, k, v = random_qkv(600, 4, 2, 64, seed=4)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        pool = Pool(2, 64, 16, [600], torch.float32)
        backend = get_backend("paged_cpu", "cpu")
        results.append(
            backend.write_and_attend(pool.kv, LAYER, AttnRows(q, k, v, 0.1), pool.batch({0: (0, 600)}), None)
        )
    torch.set_num_threads(1)
    assert teams == [1, 2]
    assert torch.equal(results[0], results[1])


def test_threads_are_waited_for_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads write into memory that is freed when the call returns."""
    waited: list[None] = []

    class Pool:
        def submit(self, *_: object) -> Pool:
            return self

        def result(self) -> None:
            waited.append(None)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    kernel = omp.Kernel(lambda arguments: None)
    kernel.__dict__["_entries"] = None, interrupted, 0
    monkeypatch.setattr(omp, "gomp_parallel", lambda: None)
    monkeypatch.setattr(omp, "_pool", lambda threads: Pool())
    with pytest.raises(KeyboardInterrupt):
        kernel.call(omp.arguments(1), 3)
    assert len(waited) == 2


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("broken", ["null page", "page id too large", "short table"])
def test_bad_slots_are_refused_before_anything_is_written(name: str, broken: str) -> None:
    q, k, v = random_qkv(20, 2, 1, 8, seed=5)
    pool = Pool(1, 8, 4, [20], torch.float32)
    batch = pool.batch({0: (0, 20)})
    if broken == "short table":
        batch.page_table = batch.page_table[:, :4]
    else:
        batch.page_table = batch.page_table.copy()
        batch.page_table[0, 3] = 0 if broken == "null page" else len(pool.kv)
    with pytest.raises(BatonError, match="slot"):
        get_backend(name, "cpu").write_and_attend(pool.kv, LAYER, AttnRows(q, k, v, 1.0), batch, None)
    assert pool.kv.isnan().all()


@pytest.mark.parametrize("name", ON_CPU)
def test_null_pages_are_not_read(name: str) -> None:
    q, k, v = random_qkv(40, 2, 1, 8, seed=6)
    pool, backend = Pool(1, 8, 4, [40], torch.float32), get_backend(name, "cpu")
    backend.write_and_attend(pool.kv, LAYER, AttnRows(q[:38], k[:38], v[:38], 0.3), pool.batch({0: (0, 38)}), 6)
    pool.table[0, :8] = 0  # tokens 0..31; the oldest one that row 38 sees is 33
    out = backend.write_and_attend(pool.kv, LAYER, AttnRows(q[38:], k[38:], v[38:], 0.3), pool.batch({0: (38, 40)}), 6)
    torch.testing.assert_close(out.double(), naive(q, k, v, 0.3, 6)[38:], rtol=1e-5, atol=1e-6)
    for page in (0, len(pool.kv)):  # freed too early, and not in the pool
        pool.table[0, 8] = page
        with pytest.raises(BatonError, match="slot"):
            backend.write_and_attend(
                pool.kv, LAYER, AttnRows(q[38:], k[38:], v[38:], 0.3), pool.batch({0: (38, 40)}), 6
            )


@pytest.mark.parametrize("name", ON_CPU)
def test_layers_of_two_groups_that_alternate_share_a_plan_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model whose windowed and full layers alternate."""
    made = []
    plan = AttnBatch.plan
    monkeypatch.setattr(
        AttnBatch, "plan", lambda batch, key, make: plan(batch, key, lambda: made.append(key) or make())
    )
    q, k, v = random_qkv(8, 2, 1, 8, seed=5)
    pools = [Pool(1, 8, 4, [8], torch.float32) for _ in range(2)]
    batches = [pool.batch({0: (0, 8)}) for pool in pools]
    backend = get_backend(name, "cpu")
    for layer in (0, 1):
        for pool, batch in zip(pools, batches, strict=True):
            backend.write_and_attend(pool.kv, layer, AttnRows(q, k, v, 0.3), batch, None)
    assert len(made) == 2


@pytest.mark.parametrize("name", ON_CPU)
def test_requests_without_rows_are_allowed(name: str) -> None:
    q, k, v = random_qkv(4, 2, 1, 8, seed=7)
    pool = Pool(1, 8, 4, [4, 4], torch.float32)
    out = get_backend(name, "cpu").write_and_attend(
        pool.kv, LAYER, AttnRows(q, k, v, 0.3), pool.batch({0: (0, 0), 1: (0, 4)}), None
    )
    torch.testing.assert_close(out.double(), naive(q, k, v, 0.3, None), rtol=1e-5, atol=1e-6)


def test_choice_of_backend() -> None:
    assert get_backend(None, "cpu").name == "paged_cpu"
    assert get_backend(None, "cuda").name == "sdpa"
    assert get_backend("sdpa", "cpu").name == "sdpa"
    assert get_backend("paged_cpu", "cpu").batch_invariant
    with pytest.raises(ConfigError, match="attention_backend: 'flash' is unknown"):
        get_backend("flash", "cpu")
    with pytest.raises(ConfigError, match="cpu only"):
        get_backend("paged_cpu", "cuda")


def test_paged_cpu_refuses_float16() -> None:
    q, k, v = (t.half() for t in random_qkv(2, 2, 1, 8, seed=8))
    pool = Pool(1, 8, 4, [2], torch.float16)
    with pytest.raises(ConfigError, match="float16"):
        get_backend("paged_cpu", "cpu").write_and_attend(
            pool.kv, LAYER, AttnRows(q, k, v, 1.0), pool.batch({0: (0, 2)}), None
        )
