"""With several ranks too, a request's fault ends only that request. Drafts that differ between ranks end the engine,
because the next plan's rows contain them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from baton import LLM
from baton.engine import executor
from baton.engine.config import EngineConfig
from baton.engine.ranks import worker
from baton.engine.ranks.orders import Start, encode_message
from baton.engine.step_plans import Sampling
from baton.errors import BatonError, EngineUnavailableError
from testkit.inside import engine_of
from tests.engine.ranks.test_rank_processes import GREEDY, PARAMS, PROMPTS, SETTINGS, TARGET


@pytest.mark.usefixtures("one_thread", "forked")
def test_a_failed_choice_ends_its_requests_and_unequal_drafts_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(TARGET, **SETTINGS, tensor_parallel_size=2) as llm:
        expected = [r.outputs[0].token_ids for r in llm.generate(PROMPTS[:3], GREEDY)]
        chosen = executor.choose_tokens

        def choose(logits: Any, sampling: Sampling | None, *more: Any) -> Any:
            if sampling is not None:
                raise ValueError("no such choice")
            return chosen(logits, sampling, *more)

        with monkeypatch.context() as patch:
            patch.setattr(executor, "choose_tokens", choose)
            with pytest.raises(BatonError, match="step_failed: ValueError"):
                llm.generate(PROMPTS, PARAMS)
            # The ranks keep running, also with such requests.
            assert [r.outputs[0].token_ids for r in llm.generate(PROMPTS[:3], GREEDY)] == expected
        assert all(r.outputs[0].token_ids for r in llm.generate(PROMPTS, PARAMS))

        core = engine_of(llm).core
        local = core.executor.local  # type: ignore[attr-defined]
        drafted = local.draft
        monkeypatch.setattr(
            local, "draft", lambda plan: replace(drafted(plan), drafts=[[7, 7, 7]] * len(plan.num_drafts))
        )
        with pytest.raises(EngineUnavailableError, match="rank 1 has other drafts"):
            llm.generate(PROMPTS, GREEDY)


def test_a_rank_whose_engine_died_while_it_imported(tmp_path: Path) -> None:
    """It has an order already, and would wait for the engine's collectives."""
    here, there = Pipe()
    with there:
        here.send_bytes(encode_message(Start(EngineConfig(model=TARGET, tensor_parallel_size=2), 1, f"{tmp_path}/s")))
        here.close()
        command = [sys.executable, "-m", "baton.engine.ranks.worker", str(there.fileno())]
        rank = subprocess.Popen(command, pass_fds=[there.fileno()])
    assert rank.wait(60.0) == -signal.SIGKILL


@pytest.mark.parametrize("closed", [EOFError, BrokenPipeError, ConnectionResetError])
def test_a_rank_whose_engine_ends_says_nothing(closed: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    def serve(pipe: Connection) -> None:
        raise closed

    here, there = Pipe()
    with here, there:
        assert worker.run(there, serve) == 0
        assert not caplog.messages
        assert not here.poll()
