"""`baton bench serve --tool`: the same load as arguments of other load generators, and a sweep as a picture."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.bench.picture import draw_sweep
from baton.cli.bench import app as bench_app
from baton.errors import ConfigError
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served, write_tokenizer

ECHO = '#!/bin/sh\nfor word in "$@"; do echo "$word"; done > {out}\nexit {code}\n'


def handed(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], code: int = 0) -> list[str]:
    """The arguments that a fake tool receives; it records them and exits with `code`."""
    program, out = tmp_path / tool, tmp_path / "arguments"
    program.write_text(ECHO.format(out=out, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = CliRunner().invoke(bench_app, ["serve", "--tool", tool, *flags])
    assert result.exit_code == code, result.output
    return out.read_text().split("\n")[:-1]


def after(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_vllm_gets_its_own_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--num-prompts", "7", "--request-rate", "4", "--goodput", "ttft:200,tpot:20", "--ignore-eos"]
    said = handed("vllm", tmp_path, monkeypatch, [*flags, "--save-result", "--max-concurrency", "3", "--model", "m"], 3)
    assert said[:2] == ["bench", "serve"]
    assert (after(said, "--num-prompts"), after(said, "--request-rate"), after(said, "--model")) == ("7", "4.0", "m")
    place = said.index("--goodput")
    assert said[place + 1 : place + 3] == ["ttft:200", "tpot:20"]
    assert {"--ignore-eos", "--save-result"} < set(said)
    assert "--save-detailed" not in said


def test_guidellm_and_aiperf_are_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--num-prompts", "7", "--request-rate", "4", "--random-input-len", "64", "--random-output-len", "9"]
    said = handed("guidellm", tmp_path, monkeypatch, flags)
    assert said[0] == "run"
    assert after(said, "--profile") == "kind=poisson,rate=4"
    assert after(said, "--data") == "kind=synthetic_text,prompt_tokens=64,output_tokens=9"
    assert after(said, "--constraint") == "kind=max_requests,count=7"
    said = handed("guidellm", tmp_path, monkeypatch, ["--max-concurrency", "5"])
    assert after(said, "--profile") == "kind=concurrent,streams=5"
    said = handed("aiperf", tmp_path, monkeypatch, [*flags, "--model", "m", "--burstiness", "0.5"])
    assert (after(said, "--isl"), after(said, "--osl"), after(said, "--request-count")) == ("64", "9", "7")
    assert (after(said, "--arrival-pattern"), after(said, "--arrival-smoothness")) == ("gamma", "0.5")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--tool", "vllm"], "tool"),
        (["--tool", "guidellm"], "tool"),
        (["--tool", "aiperf", "--model", "m"], "tool"),
        (["--tool", "vllm", "--percentile-metrics", "ttft,handoff"], "percentile_metrics"),
        (["--tool", "vllm", "--sweep", "1,2"], "sweep"),
        (["--tool", "vllm", "--json"], "json"),
        (["--tool", "guidellm", "--goodput", "ttft:3"], "goodput"),
        (["--tool", "guidellm", "--request-rate", "2", "--burstiness", "2"], "burstiness"),
        (["--tool", "guidellm", "--random-prefix-len", "2"], "random_prefix_len"),
        (["--tool", "guidellm", "--ignore-eos"], "ignore_eos"),
        (["--tool", "aiperf"], "model"),
        (["--tool", "aiperf", "--model", "m", "--random-range-ratio", "0.5"], "random_range_ratio"),
        (["--sweep", "1,x"], "sweep"),
        (["--sweep", "1,0"], "sweep"),
        (["--sweep", "1", "--request-rate", "2"], "request_rate"),
        (["--sweep", "1", "--sweep-duration-s", "0"], "sweep_duration_s"),
        (["--sweep-duration-s", "3"], "sweep_duration_s"),
        (["--plot", "a.png"], "plot"),
        (["--sweep", "1,2", "--plot", "a.pdf"], "plot"),
    ],
)
def test_flags_that_a_load_tool_lacks_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], field: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    result = CliRunner().invoke(bench_app, ["serve", *flags])
    assert isinstance(result.exception, ConfigError), result.output
    assert result.exception.field == field


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(bench_app, ["serve", "--sweep", "1,2", "--plot", "a.png"])
    assert isinstance(result.exception, ConfigError)
    assert "baton-serve[bench]" in str(result.exception)


async def test_a_sweep_is_a_result_for_each_rate(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    arguments = ["serve", "--random-input-len", "5", "--random-output-len", "6", "--tokenizer", str(directory)]
    arguments += ["--sweep", "20,40", "--sweep-duration-s", "0.2", "--goodput", "ttft:60000", "--save-result"]
    arguments += ["--result-dir", str(tmp_path), "--result-filename", "sweep.json"]
    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        shown = await asyncio.to_thread(CliRunner().invoke, bench_app, [*arguments, "--base-url", url])
    assert shown.exit_code == 0, shown.output
    heads, *lines = shown.stdout.splitlines()
    assert heads.split()[:3] == ["request_rate", "completed", "failed"]
    assert [line.split()[:3] for line in lines] == [["20.000", "4", "0"], ["40.000", "8", "0"]]
    sweep = json.loads((tmp_path / "sweep.json").read_text())["sweep"]
    assert [(one["request_rate"], one["num_prompts"], one["completed"]) for one in sweep] == [
        (20.0, 4, 4),
        (40.0, 8, 8),
    ]
    assert all(one["request_goodput"] == one["request_throughput"] for one in sweep)


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def point(rate: float, served_: float, failed: int) -> dict[str, Any]:
        times = {f"{part}_{metric}_ms": 3.0 * rate for part in ("median", "p99") for metric in ("ttft", "tpot")}
        return {"request_rate": rate, "request_goodput": served_, "completed": 9, "failed": failed, **times}

    path = tmp_path / "made" / "sweep.png"
    nothing = {**point(3.0, 0.0, 1), "median_ttft_ms": None, "p99_tpot_ms": None}
    draw_sweep({"one": [point(1.0, 1.0, 0), point(2.0, 1.5, 3)], "other": [point(1.0, 0.9, 0), nothing]}, str(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert 10_000 < path.stat().st_size < 150_000
