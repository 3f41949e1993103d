"""Data-parallel ranks that share experts: each has the bits of a single rank, whatever the others compute."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from baton.engine.attention.registry import get_backend
from baton.engine.config import EngineConfig
from baton.engine.loading.engine_facts import numeric_probe
from baton.engine.memory.kv_memory import model_groups
from baton.engine.ranks.collective import Exchange
from baton.errors import ConfigError
from baton.models.layers.expert_parallel import ExpertRanks, RemoteExpert, SharedLayer
from baton.models.layers.moe import Experts
from baton.models.layers.parallel import TensorRank
from baton.models.loading.filling import weight_table
from baton.models.loading.loader import load_model
from testkit.checkpoints.gpt_oss import make_gpt_oss
from testkit.checkpoints.granite import make_granite
from testkit.checkpoints.written import WRITTEN, make_written
from tests.models.test_ranks import CASES, FOUR

R = TypeVar("R")
Checkpoint = Callable[..., Path]
KINDS = ("deepseek_v3", "qwen3_moe", "granitemoehybrid", "gpt_oss", "nemotron_h")


@pytest.fixture(scope="module")
def path_of(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def path_of(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            if kind == "granitemoehybrid":
                made[kind] = make_granite(folder, mamba_n_heads=8, mamba_n_groups=4, num_local_experts=4)
            elif kind == "gpt_oss":
                made[kind] = make_gpt_oss(folder)
            elif kind in WRITTEN:
                made[kind] = make_written(folder, kind, moe_latent_size=12)
            else:
                made[kind] = checkpoint(kind, **{**FOUR, **CASES[kind]})
        return made[kind]

    return path_of


def on_ranks(store: Path, size: int, call: Callable[[ExpertRanks], R]) -> list[R]:
    """The results of `call` on each rank, one thread each, over gloo."""

    def run(rank: int) -> R:
        exchange = Exchange(str(store / "store"), rank, size)
        return call(ExpertRanks(rank, size, exchange.gather, exchange.all_to_all))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def probe(path: Path, dtype: str, ranks: TensorRank, times: int = 1) -> list[str]:
    """The numeric probe of a prompt's logits, `times` times."""
    model = load_model(path, dtype, "cpu", True, ranks)
    groups = model_groups(EngineConfig(str(path)), model, None)
    backend = get_backend(None, "cpu")
    return [numeric_probe(model, groups, backend, torch.device("cpu")) for _ in range(times)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("size", "slices", "dtype"), [(2, 1, "bfloat16"), (4, 2, "float32")])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_experts_have_the_bits_of_one(
    path_of: Callable[[str], Path], tmp_path: Path, kind: str, size: int, slices: int, dtype: str
) -> None:
    """Ranks compute different amounts, the last one nothing: all continue until all are done."""
    path = path_of(kind)
    (alone,) = probe(path, dtype, TensorRank(num_slices=slices))

    def run(shared: ExpertRanks) -> tuple[list[str], list[int]]:
        ranks = TensorRank(num_slices=slices, experts=shared)
        found = probe(path, dtype, ranks, times=size - 1 - shared.rank)
        return found, shared.finish(shared.rank)

    assert on_ranks(tmp_path, size, run) == [([alone] * (size - 1 - rank), list(range(size))) for rank in range(size)]


@pytest.mark.usefixtures("one_thread", "unpacked")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_each_expert_once_between_them(path_of: Callable[[str], Path], kind: str) -> None:
    whole = weight_table(load_model(path_of(kind)))
    names: list[str] = []
    for rank in range(3):  # of four experts
        shared = ExpertRanks(rank, 3, lambda head: [head], lambda parts, sizes: parts)
        model = load_model(path_of(kind), ranks=TensorRank(experts=shared))
        table = weight_table(model)
        assert all(torch.equal(place.tensor, whole[name].tensor) for name, place in table.items())
        names += [name for name in table if ".experts." in name]
        for layer in (part for part in model.modules() if isinstance(part, Experts)):
            held = [expert for expert, part in enumerate(layer) if not isinstance(part, RemoteExpert)]
            assert held == list(shared.local_experts(len(layer)))
    assert sorted(names) == sorted(name for name in whole if ".experts." in name)


@pytest.mark.usefixtures("one_thread")
def test_rows_for_one_rank_alone_and_for_none_are_made(tmp_path: Path) -> None:
    """Rows whose experts are all on one rank, while that rank asks for others' and a third for none."""
    asked = {0: [[2], [2]], 1: [[0], [1]]}

    def run(shared: ExpertRanks) -> list[float]:
        held = shared.local_experts(3)

        def make(rows: Any, places: Any, experts: Any) -> torch.Tensor:
            assert set(experts.tolist()) <= set(held)
            return rows[places] * 10.0 + experts[:, None]

        number = shared.add(SharedLayer(make, 3, 1, 1, torch.float32, torch.device("cpu")))
        out = torch.zeros(0, 1)
        if shared.rank in asked:
            ids = torch.tensor(asked[shared.rank])
            out = shared.made(number, torch.tensor([[1.0], [2.0]]) + 2 * shared.rank, ids)
        shared.finish(0)
        return [float(each) for each in out.flatten()]

    assert on_ranks(tmp_path, 3, run) == [[12.0, 22.0], [30.0, 41.0], []]


def test_fewer_experts_than_ranks_are_named() -> None:
    shared = ExpertRanks(0, 4, lambda head: [head], lambda parts, sizes: parts)
    with pytest.raises(ConfigError, match="data_parallel_size: is 4, and the model has 3 experts"):
        shared.local_experts(3)
