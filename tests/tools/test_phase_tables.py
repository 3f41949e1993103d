"""The tables of phase and event in docs/protocol.md match the state machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.phases import DecodePhase, PrefillPhase
from baton.handoff.protocol.transitions import DECODE, PREFILL, Table
from tools.phase_tables import BEGIN, D_EVENTS, DOC, END, P_EVENTS, SIDES, arrived, tables


def test_the_tables_are_what_the_machines_do() -> None:
    text = DOC.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == tables(), "run python -m tools.phase_tables"


@pytest.mark.parametrize("side", SIDES)
def test_every_phase_is_a_column_and_is_reached(side: str) -> None:
    make, paths, _ = SIDES[side]
    phases = {phase.value for phase in (PrefillPhase if side == "P" else DecodePhase)}
    assert phases == {name for columns in paths.values() for name in columns}
    for mode, columns in paths.items():
        for name, path in columns.items():
            assert arrived(make, mode, path).phase.value == name


def test_every_transition_of_the_tables_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transition that no event causes would be a dead row of the document."""
    taken: dict[str, set[tuple[str, Any]]] = {}
    after = Table.after

    def recorded(self: Table[Any], phase: Any, event: str, events: Iterable[Any] = ()) -> Any:
        found = after(self, phase, event, events)
        taken.setdefault(self.machine, set()).add((event, phase))
        return found

    monkeypatch.setattr(Table, "after", recorded)
    tables()
    for table in (PREFILL, DECODE):
        every = {(step, phase) for step, row in table.steps.items() for phase in row}
        assert every <= taken[table.machine]


def test_every_message_of_an_attempt_is_a_row() -> None:
    kinds = {str(cls.__struct_config__.tag) for cls in msg.AttemptMessage.__subclasses__()}
    assert kinds <= P_EVENTS.keys() | D_EVENTS.keys()
