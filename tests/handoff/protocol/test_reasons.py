"""Metric labels come from a closed set, whatever a peer sends."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import baton
from baton.errors import REASONS, reason_label
from baton.handoff.agent.stats import AgentCounters, CopyStats
from baton.handoff.protocol.copies import CopyLedger
from baton.handoff.protocol.events import DecodeFailed, PrefillReleased
from baton.handoff.protocol.messages import AttemptKey

KEY = AttemptKey(bytes(16), 0, "P-1", "D-1")
# Calls whose reason ends in an event of the agent, by the index of the reason argument.
GIVES = {"Fault": 0, "_fail": 0, "fail": 1, "Abort": 0, "abort": 1, "HandoffError": 0}


@pytest.mark.parametrize("text", ["x" * 60, "peer lost", "other", ""])
def test_a_peers_own_words_are_one_label(text: str) -> None:
    counters = AgentCounters()
    counters.note(DecodeFailed(KEY, text, ""), CopyLedger())
    counters.note(PrefillReleased(KEY, text + "!"), CopyLedger())
    counters.note(PrefillReleased(KEY, "peer_lost"), CopyLedger())
    assert counters.snapshot(CopyStats()).failures == {"other": 2, "peer_lost": 1}
    assert reason_label(text) == "other"


def test_batons_own_reasons_are_all_known() -> None:
    given = set()
    for package in ("handoff", "engine", "vllm", "router"):
        for path in (Path(baton.__file__).parent / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                index = GIVES.get(name)
                if index is None or len(node.args) <= index:
                    continue
                reasons = [n.value for n in ast.walk(node.args[index]) if isinstance(n, ast.Constant)]
                given |= {reason for reason in reasons if isinstance(reason, str) and reason.isidentifier()}
    assert len(given) > 15
    assert given - {"abort"} <= REASONS
