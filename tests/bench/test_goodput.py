"""The router's choice over modelled engines in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.serving.goodput import POLICIES, Cluster, Machine
from benchmarks.serving.trace import make_trace

NUM = 60


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_serves_the_whole_trace(policy: str) -> None:
    report = Cluster(policy, 2, 2, Machine()).run(make_trace(NUM, 2.0))
    assert len(report.ttft_s) == NUM
    assert 0 < report.computed <= report.asked
