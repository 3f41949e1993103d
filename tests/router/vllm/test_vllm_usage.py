"""The router's usage report of drafts, which vLLM does not report."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.servers.vllm_pair import Pair, complete


@pytest.mark.parametrize("num_drafts", [0, 3])
async def test_drafts_that_nobody_counted_are_not_called_none(directory: Path, num_drafts: int) -> None:
    async with Pair(directory, num_drafts=num_drafts).run() as (url, session):
        status, answer = await complete(session, url)
        assert status == 200, answer
        nothing = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        assert answer["usage"].get("completion_tokens_details") == (None if num_drafts else nothing)
