"""A prefill engine's part of a request ends with its transfer, not with its prefill."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from testkit.engines import Mode, pair
from tests.engine.models.test_every_kind import prompt_of


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_prefill_leg_ends_when_its_transfer_does_so_that_a_shutdown_waits_for_it(tmp_path: Path, mode: Mode) -> None:
    """A server that is told to end lets its streams run: that of a prefill leg is open while D may still read."""
    with pair(tmp_path) as two:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        told, rest = two.legs("r", prompt_of(40), params, mode)
        while not told.token_ids:
            two.prefill.step()
        two.await_session()
        for _ in range(20):
            two.prefill.step()
        assert not told.ended, "the prompt is computed, and D has taken nothing"
        assert two.prefill.core.load().num_referenced_pages > 0
        two.step_until(lambda: rest.ended and told.ended)
        two.settle()
        assert two.prefill.core.load().num_referenced_pages == 0
