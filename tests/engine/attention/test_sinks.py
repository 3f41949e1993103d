"""Attention sinks: one more logit per head in the softmax, in every backend, with batch-invariant rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.attention.registry import BACKENDS, get_backend
from baton.models.layer_cache import AttnRows
from tests.engine.attention.test_attention import LAYER, Pool, random_qkv

pytestmark = pytest.mark.usefixtures("one_thread")
# The CUDA backend is tested in `test_attention_cuda.py`.
ON_CPU = sorted(BACKENDS.keys() - {"triton"})


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor) -> Tensor:
    """Float64 attention of a whole sequence, [T, H, D]; the sink's column is dropped after the softmax."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(repeat, 1), v.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    i = torch.arange(len(q))
    visible = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - (window or len(q)))
    scores = scores.masked_fill(~visible, float("-inf"))
    column = sinks.double()[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize(("heads", "groups", "size", "page_size"), [(4, 2, 16, 16), (6, 1, 20, 7), (3, 3, 10, 1)])
def test_equals_the_reference(
    name: str, window: int | None, heads: int, groups: int, size: int, page_size: int
) -> None:
    tokens = 140
    q, k, v = random_qkv(tokens, heads, groups, size, seed=1)
    # Some sinks are above all scores, some far below.
    sinks = torch.linspace(-40.0, 9.0, heads)
    pool, backend = Pool(groups, size, page_size, [tokens], torch.float32), get_backend(name, "cpu")
    expected = naive(q, k, v, 0.3, window, sinks)
    for start, stop in [(0, 70), (70, 71), (71, 140)]:
        part = slice(start, stop)
        batch = pool.batch({0: (start, stop)})
        out = backend.write_and_attend(pool.kv, LAYER, AttnRows(q[part], k[part], v[part], 0.3, sinks), batch, window)
        torch.testing.assert_close(out.double(), expected[part], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_sink_that_weighs_nothing_changes_nothing(name: str) -> None:
    q, k, v = random_qkv(90, 4, 2, 16, seed=2)
    outs = []
    for sinks in (None, torch.full((4,), -1e30)):
        pool = Pool(2, 16, 16, [90], torch.float32)
        batch = pool.batch({0: (0, 90)})
        outs.append(get_backend(name, "cpu").write_and_attend(pool.kv, LAYER, AttnRows(q, k, v, 0.3, sinks), batch, 20))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ON_CPU)
def test_sinks_in_bfloat16_are_close_to_float64(name: str) -> None:
    q, k, v = (part.bfloat16() for part in random_qkv(90, 4, 2, 32, seed=2))
    sinks, pool = torch.tensor([0.5, -1.0, 2.0, 0.0]), Pool(2, 32, 16, [90], torch.bfloat16)
    batch = pool.batch({0: (0, 90)})
    out = get_backend(name, "cpu").write_and_attend(pool.kv, LAYER, AttnRows(q, k, v, 0.2, sinks), batch, None)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), naive(q, k, v, 0.2, None, sinks), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_paged_rows_are_equal_to_the_bit(dtype: torch.dtype, window: int | None) -> None:
    """With any chunks, batch neighbours and page size."""
    lengths, heads, groups, size = [130, 1, 64], 4, 2, 20
    data = [tuple(t.to(dtype) for t in random_qkv(n, heads, groups, size, seed=n)) for n in lengths]
    sinks, backend = torch.tensor([0.5, -1.0, 2.0, 0.0]), get_backend("paged_cpu", "cpu")

    def run(page_size: int, schedule: list[dict[int, tuple[int, int]]]) -> list[Tensor]:
        pool = Pool(groups, size, page_size, lengths, dtype)
        out = [torch.full((n, heads, size), float("nan"), dtype=dtype) for n in lengths]
        for spans in schedule:
            q, k, v = (torch.cat([data[r][part][a:b] for r, (a, b) in spans.items()]) for part in range(3))
            rows = backend.write_and_attend(pool.kv, LAYER, AttnRows(q, k, v, 0.25, sinks), pool.batch(spans), window)
            for (r, (a, b)), part in zip(spans.items(), rows.split([b - a for a, b in spans.values()]), strict=True):
                out[r][a:b] = part
        return out

    whole = run(16, [{r: (0, n)} for r, n in enumerate(lengths)])
    singles = run(7, [{r: (i, i + 1)} for r, n in enumerate(lengths) for i in range(n)])
    mixed = run(5, [{0: (0, 3), 2: (0, 33)}, {1: (0, 1), 0: (3, 66), 2: (33, 64)}, {0: (66, 130)}])
    assert [
        other for other in (singles, mixed) if not all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    ] == []
