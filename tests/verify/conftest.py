"""`baton verify` in this process, between two small servers."""

from __future__ import annotations

import pytest

from baton import cli
from baton.verify import counters
from testkit.servers.fake_openai import FakeOpenAI, running
from tests.verify.command import Result, Verify

NUM = 4  # requests


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    monkeypatch.setattr(counters, "_POLL_S", 0.01)

    def run(reference: FakeOpenAI, candidate: FakeOpenAI, *flags: str) -> Result:
        with running(reference) as one, running(candidate) as other:
            given = [flag.format(reference=one, candidate=other) for flag in flags]
            chosen = "--prompts" in flags or "--chat" in flags
            lengths = [] if chosen else ["--lengths", f"5-{4 + NUM}"]
            command = ["verify", "--reference", one, "--candidate", f"{other}/v1", "--max-tokens", "8"]
            try:
                cli.main([*command, *lengths, *given])
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
        shown = capsys.readouterr()
        return Result(code, shown.out, shown.err)

    return run
