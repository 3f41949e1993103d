"""An engine of two tensor ranks as processes: one rank's tokens and drafts, and it ends when either rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton import LLM, SamplingParams, StructuredOutputsParams
from baton.engine.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from baton.engine.ranks.orders import Compute, decode_order, encode_message
from baton.engine.ranks.rank_executor import RankExecutor
from baton.engine.step_plans import DraftPlan, DraftResult, StepPlan, one_request
from baton.errors import BatonError, ConfigError, EngineUnavailableError
from baton.kvstore.store import StoreOptions
from baton.transports.mapped.segments import file_of
from testkit.checkpoints.gemma4 import make_assistant, make_gemma4
from testkit.checkpoints.granite import make_granite
from testkit.engines import MakeDrafts
from testkit.inside import engine_of
from testkit.processes.launcher import Launcher

pytestmark = pytest.mark.usefixtures("one_thread", "forks")
TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
GRAMMAR = StructuredOutputsParams(regex="[a-z]{5,20}! [0-9]+")  # every rank's drafter follows it
PARAMS = [*[GREEDY] * 3, SamplingParams(max_tokens=24, temperature=0.8, seed=4, structured_outputs=GRAMMAR)]
PROMPTS = ["The for statement", "def f(x):\n    return", "A list is a mutable sequence and " * 6, "x"]
SETTINGS: dict[str, Any] = {"batch_invariant": True, "speculative_config": EAGLE3, "kv_cache_memory": 2 << 20}


def answers(llm: LLM) -> list[tuple[list[int], list[int]]]:
    return [(r.outputs[0].token_ids, r.outputs[0].accepted) for r in llm.generate(PROMPTS, PARAMS)]


def followers(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", "ranks.worker"], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def forked_ranks(launcher: Launcher) -> list[int]:
    return [pid for pid in launcher.children() if _state(pid) != "Z"]


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}/stat").exists() and _state(pid) != "Z" for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_two_ranks_give_what_one_gives_and_end_together(launcher: Launcher) -> None:
    with LLM(TARGET, **SETTINGS, reduction_slices=2) as llm:
        expected = answers(llm)
    with LLM(TARGET, **SETTINGS, tensor_parallel_size=2) as llm:
        assert answers(llm) == expected
        # Now prefixes are hit, pages copied, requests preempted.
        assert answers(llm) == expected
        (other,) = forked_ranks(launcher)
        os.kill(other, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError, match=r"rank 1 (ended with status -9|has gone)"):
            llm.generate(PROMPTS, PARAMS)
    assert forked_ranks(launcher) == []


def test_stages_of_two_ranks_give_what_one_rank_gives(launcher: Launcher) -> None:
    """The drafter gets features of layers on both stages."""
    with LLM(TARGET, **SETTINGS, reduction_slices=2) as llm:
        expected = answers(llm)
    with LLM(TARGET, **SETTINGS, tensor_parallel_size=2, pipeline_parallel_size=2) as llm:
        assert answers(llm) == expected
        assert len(forked_ranks(launcher)) == 3


def test_stages_may_have_groups_that_others_have_not(tmp_path: Path) -> None:
    """States and full attention; a stage may have no layer of one of them."""
    path = str(make_granite(tmp_path / "model"))
    prompts = [{"prompt_token_ids": [(7 * i + j) % 200 for i in range(n)]} for j, n in enumerate((1, 5, 16, 33, 40))]
    settings: dict[str, Any] = {"batch_invariant": True, "kv_cache_memory": 4 << 20, "skip_tokenizer_init": True}
    found = []
    for stages in (1, 2):
        with LLM(path, **settings, pipeline_parallel_size=stages) as llm:
            found.append([result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)])
    assert found[0] == found[1]


def test_a_rank_ends_with_the_first_and_leaves_no_files(tmp_path: Path) -> None:
    """A real start, not forks."""
    code = (
        "from baton import LLM; import sys, time\n"
        f"llm = LLM({TARGET!r}, tensor_parallel_size=2, kv_cache_memory=1 << 20)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert first.stdout is not None
    with first, first.stdout:
        assert first.stdout.readline() == "ready\n"
        others = followers(first.pid)
        assert len(others) == 1
        first.kill()
        first.wait()
        until_gone(others)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: must be one of 1, 2, 4, 8, got 3"),
        ({"tensor_parallel_size": 4, "reduction_slices": 2, "batch_invariant": True}, "reduction_slices: must be a "),
        ({"tensor_parallel_size": 2, "reduction_slices": 2}, "reduction_slices: must be left out without"),
        (
            {"tensor_parallel_size": 2, "kv_transfer_config": KVTransferConfig(prefix_store=StoreOptions())},
            "kv_transfer_config.prefix_store: is for engines of one rank",
        ),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size: must be 1 to 8, got 9"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "tensor_parallel_size: must be 1 unless device is cpu"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(TARGET, **settings).check()


def test_a_drafter_is_whole_on_every_rank() -> None:
    alone = EAGLE3 | {"draft_tensor_parallel_size": 1}
    assert SpeculativeConfig.parse(alone) is not None
    with pytest.raises(ConfigError, match=r"speculative_config.draft_tensor_parallel_size: must be 1"):
        SpeculativeConfig.parse(alone | {"draft_tensor_parallel_size": 2})


def test_a_model_that_cannot_be_cut_leaves_nothing(launcher: Launcher, tmp_path: Path) -> None:
    path = str(make_granite(tmp_path, mamba_n_heads=3, mamba_n_groups=3))
    with pytest.raises(BatonError, match="tensor_parallel_size: is 2, which does not divide the model's 3 heads"):
        LLM(path, tensor_parallel_size=2)
    assert forked_ranks(launcher) == []


def test_plans_travel_as_they_are() -> None:
    plan = StepPlan(one_request([5, 6, 7], {"full": [3, 1], "state": [2]}, {"state"}), np.array([2]))
    got = decode_order(encode_message(Compute(plan)))
    assert isinstance(got, Compute)
    assert encode_message(got) == encode_message(Compute(plan))
    assert got.plan.rows.query_start.dtype == np.int32
    assert got.plan.rows.tables["full"].tolist() == [[3, 1]]
    for bad in (b"", b"\x80", msgspec.msgpack.encode({"type": "compute"}), encode_message(Compute(plan))[:-3]):
        with pytest.raises(msgspec.MsgspecError):
            decode_order(bad)


def test_memory_that_no_other_process_reaches_is_named(tmp_path: Path) -> None:
    """Though this process has mapped a file whose name is no text."""
    mapped = np.memmap(tmp_path / os.fsdecode(b"caf\xe9\xc2\x85 b"), mode="w+", shape=(1,), dtype=np.uint8)
    with pytest.raises(ConfigError, match="kv_transport: must be shm with several tensor ranks"):
        file_of(np.zeros(16, dtype=np.uint8))
    del mapped


def test_a_plan_that_fails_ends_the_ranks() -> None:
    """A rank that raised is inside an all-reduce in which the others wait."""
    with LLM(TARGET, **SETTINGS, tensor_parallel_size=2) as llm:
        executor = engine_of(llm).core.executor
        assert isinstance(executor, RankExecutor)
        rows = one_request([1, 2], {name: [99999] for name in executor.spec.target_groups})
        with pytest.raises(EngineUnavailableError, match="rank"):
            executor.execute(StepPlan(rows, np.array([1])))
        with pytest.raises(EngineUnavailableError, match="rank"):
            llm.generate(PROMPTS, PARAMS)


def other_pages(draft: MakeDrafts, plan: DraftPlan) -> DraftResult:
    """Only the last stage reads full attention."""
    tables = {n: t + 10**6 if n.startswith("target.full") else t for n, t in plan.rows.tables.items()}
    return draft(replace(plan, rows=replace(plan.rows, tables=tables)))


@pytest.mark.parametrize("loss", ["dies", "fails"])
def test_a_stage_that_is_lost_while_a_drafter_asks_it_ends_the_engine(
    loss: str, launcher: Launcher, tmp_path: Path
) -> None:
    """Gemma 4's assistant attends to keys of the last stage."""
    kinds = ["sliding_attention", "full_attention"]
    target = make_gemma4(tmp_path / "target", "gemma4-k_is_v", num_hidden_layers=2, layer_types=kinds)
    settings = {**SETTINGS, "speculative_config": make_assistant(tmp_path / "assistant", target)}
    with LLM(str(target), **settings, pipeline_parallel_size=2) as llm:
        executor = engine_of(llm).core.executor
        (stage,) = forked_ranks(launcher)
        draft, local = executor.draft, executor.local.draft

        def stops_then_dies(plan: DraftPlan) -> DraftResult:
            """It cannot answer."""
            os.kill(stage, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (stage, signal.SIGKILL)).start()
            return local(plan)

        if loss == "dies":
            executor.local.draft = stops_then_dies
        else:
            executor.draft = lambda plan: other_pages(draft, plan)
        with pytest.raises(EngineUnavailableError, match=r"rank 1 (ended with status|has gone|failed)"):
            llm.generate(PROMPTS, PARAMS)
