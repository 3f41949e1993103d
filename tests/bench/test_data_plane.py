"""`baton bench handoff` and `baton bench transport`: moved bytes are counted, and a missing requirement is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.bench.modelled import ModelledKV
from baton.cli.bench import app as bench_app
from baton.errors import ConfigError
from baton.kv.interval import Interval

SMALL = ["--num-layers", "2", "--num-kv-heads", "2", "--head-dim", "8", "--num-iters", "1"]


def test_handoffs_between_two_processes_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "made" / "out.json"
    arguments = ["handoff", *SMALL, "--num-tokens", "320", "--max-num-batched-tokens", "160", "--output-json"]
    arguments += [str(path), "--prefill-rate", "1600", "--decode-tensor-parallel-size", "2"]
    shown = CliRunner().invoke(bench_app, arguments)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.split()[:2] == ["num_tokens", "fragmentation"]
    result = json.loads(path.read_text())
    fresh, churned, full = result["handoffs"]
    assert (result["decode_tensor_parallel_size"], result["kv_layout"]) == (2, "block")
    # 320 entries of 2 target layers and 1 drafter layer, K and V of 2 heads of 8 bfloat16 elements.
    assert fresh["num_bytes"] == churned["num_bytes"] == full["num_bytes"] == 320 * 3 * 2 * 2 * 8 * 2
    # Each of D's ranks has one of a token's two heads, so every token is its own run, in any order of pages.
    assert fresh["runs"] == full["runs"] == 320 * 3 * 2 * 2
    assert fresh["over_fresh"] is None
    assert full["over_fresh"] > 0
    # The first chunk, with the drafter's part, is copied during the second. On a busy machine less is copied by then,
    # or the end of the prefill comes late, after copies of the second.
    hidden = [one["hidden_bytes"] for one in (fresh, churned, full)]
    assert any(0.45 < share < 1 for share in hidden), hidden


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_runs_of_fresh_and_fragmented_pools(layout: str) -> None:
    arguments = ["handoff", *SMALL, "--num-tokens", "160", "--kv-layout", layout, "--kv-mode", "pull", "--json"]
    shown = CliRunner().invoke(bench_app, arguments)
    assert shown.exit_code == 0, shown.output
    runs = {one["fragmentation"]: one["runs"] for one in json.loads(shown.stdout)["handoffs"]}
    planes = 2 if layout == "block" else 6  # a run for target and drafter, or for K and V of each layer
    assert (runs["fresh"], runs["full"]) == (planes, 10 * planes)
    assert planes <= runs["churned"] <= 10 * planes


def test_ranks_share_the_heads() -> None:
    kv = ModelledKV(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4, layout="layer")
    held = {
        size: [(r.geometry.planes[0].first_head, r.geometry.planes[0].num_heads) for r in found.groups["target"]]
        for size in (1, 2, 4)
        for found in [kv.instance(size, 8)]
    }
    assert held == {1: [(0, 2)], 2: [(0, 1), (1, 1)], 4: [(0, 1), (0, 1), (1, 1), (1, 1)]}
    assert kv.wanted(7) == {"target": Interval(0, 7), "draft": Interval(0, 7)}
    assert kv.final(7, 7) == {"target": 7, "draft": 6}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["handoff", "--num-tokens", "5,x"], "num_tokens"),
        (["handoff", "--num-tokens", "0"], "num_tokens"),
        (["handoff", "--num-tokens", "99999999999"], "num_tokens"),
        (["handoff", "--num-tokens", "9" * 5000], "num_tokens"),
        (["handoff", "--dtype", "int3"], "dtype"),
        (["handoff", "--fragmentation", "some"], "fragmentation"),
        (["handoff", "--prefill-rate", "inf"], "prefill_rate"),
        (["handoff", "--prefill-tensor-parallel-size", "3"], "prefill_tensor_parallel_size"),
        (["handoff", "--kv-transport", "local"], "kv_transport"),
        (["handoff", "--kv-transport", "pigeon"], "transport"),
        (["transport", "--kv-transport", "shm,local"], "kv_transport"),
        (["transport", "--size", "many"], "size"),
        (["transport", "--size", "0"], "size"),
        (["transport", "--run-size", "0"], "run_size"),
    ],
)
def test_settings_that_cannot_be_are_named(arguments: list[str], field: str) -> None:
    result = CliRunner().invoke(bench_app, arguments)
    assert isinstance(result.exception, ConfigError), result.output
    assert result.exception.field == field
