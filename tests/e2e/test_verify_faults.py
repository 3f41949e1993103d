"""`baton verify` over real processes: every injected fault is found, in both modes."""

from __future__ import annotations

import pytest

from testkit.processes.verifying import verify

pytestmark = pytest.mark.usefixtures("forks")


@pytest.mark.parametrize(
    "fault", ["drop", "drop-draft", "shift-page", "corrupt", "drop-last-page", "stale-seed", "fail"]
)
def test_broken_handoffs_are_found(fault: str) -> None:
    result = verify("--kv-transport", f"faulty+shm://?fault={fault}", "--modes", "push,pull", lengths="31-34,60-63")
    assert result.returncode == 1, result.stdout + result.stderr
    for mode in ("push", "pull"):
        found = [line for line in result.stdout.splitlines() if line.startswith(f"DIFFERENT {mode}: request ")]
        assert found, result.stdout
        if fault == "drop-draft":
            # Verification keeps the tokens right; only acceptance shows the fault.
            assert any("acceptance of round" in line and "expected" in line for line in found), result.stdout
