"""The check on a GPU: how an answer ended whose prefill server was killed."""

from __future__ import annotations

import pytest

from tools.gpu_check.vllm_requests import Answer, end_of

WANTED = Answer([5, 6, 7], [2.0, 0.05, 1.5])


@pytest.mark.parametrize(
    ("tokens", "end"),
    [([5, 6, 7], "as one vLLM"), ([5, 8, 9], "near-tie"), ([4, 6, 7], "other tokens"), ([5, 6, 8], "other tokens")],
)
def test_an_answer_is_excused_only_where_the_reference_has_a_near_tie(tokens: list[int], end: str) -> None:
    assert end_of(WANTED, Answer(tokens, [3.0] * 3)) == end


def test_an_error_keeps_its_name() -> None:
    assert end_of(WANTED, "error peer_lost") == "error peer_lost"
