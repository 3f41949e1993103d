"""The transition tables of the handoff's state machines: (phase, event) -> phase.

An input comes from outside and has the name of its event or message. A step is a decision of a machine, in lower case
and named after its cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from baton.errors import UndefinedTransitionError
from baton.handoff.protocol.phases import DecodePhase, EnginePhase, PeerPhase, PrefillPhase

PhaseT = TypeVar("PhaseT", bound=Enum)
# An input and None, or a step and the phase after it.
HistoryEntry = tuple[str, Enum | None]


def format_events(events: Iterable[HistoryEntry]) -> list[str]:
    return [what if phase is None else f"{what} -> {phase.value}" for what, phase in events]


class Table(Generic[PhaseT]):
    """The transitions of one machine. `steps`: per event, the phase that follows each allowed phase. `inputs`: per
    event, the phases that allow it without changing by it.
    """

    def __init__(
        self, machine: str, steps: Mapping[str, Mapping[PhaseT, PhaseT]], inputs: Mapping[str, Iterable[PhaseT]]
    ) -> None:
        self.machine, self.steps = machine, steps
        self._after = {event: dict(row) for event, row in steps.items()}
        self._after.update({event: {phase: phase for phase in phases} for event, phases in inputs.items()})

    def after(self, phase: PhaseT, event: str, events: Iterable[HistoryEntry] = ()) -> PhaseT:
        """`events`: the last ones, for the error. Raises `UndefinedTransitionError` if `event` cannot happen in
        `phase`."""
        try:
            return self._after[event][phase]
        except KeyError:
            raise UndefinedTransitionError(self.machine, phase.value, event, format_events(events)) from None


_ENDS = ("abort", "deadline", "fault", "peer lost", "tick", "copy ended", "CANCEL", "CANCELLED")

# ---------------------------------------------------------------- P

_P = PrefillPhase
PREFILL = Table(
    "P's machine",
    {
        "commit": {_P.OPEN: _P.COMMITTED},
        "offer": {_P.OPEN: _P.READY},
        "confirm": {_P.READY: _P.CONFIRMED},
        "repair": {_P.COMMITTED: _P.OPEN},
        "end": {_P.OPEN: _P.ENDING},
        "copies ended": {_P.ENDING: _P.ENDED},
        "finish": {_P.ENDED: _P.FINISHED},
        "acknowledge": {_P.COMMITTED: _P.CLOSED, _P.CONFIRMED: _P.CLOSED, _P.FINISHED: _P.CLOSED},
        "fail": {
            _P.OPEN: _P.STOPPING,
            _P.ENDING: _P.STOPPING,
            _P.ENDED: _P.STOPPING,
            _P.COMMITTED: _P.STOPPING,
            _P.FINISHED: _P.STOPPING,
            _P.READY: _P.AWAITING_READER,
            _P.CONFIRMED: _P.AWAITING_ACK,
        },
        "quiet": dict.fromkeys((_P.STOPPING, _P.AWAITING_READER, _P.AWAITING_ACK), _P.CLOSED),
    },
    dict.fromkeys(
        (
            *("opened", "admitted", "declared", "layers written", "layers withdrawn", "sampled", "digests computed"),
            *("ANNOUNCE", "REGISTER", "READ_DONE", "REPAIR", "ACK"),
            *_ENDS,
        ),
        _P,
    ),
)

_E = EnginePhase
_OPEN_LEG = (_E.OPENED, _E.ADMITTED, _E.RELEASED)
PREFILL_ENGINE = Table(
    "P's engine",
    {
        "opened": {
            _E.ABSENT: _E.OPENED,
            _E.OPENED: _E.OPENED,
            _E.ADMITTED: _E.ADMITTED,
            _E.RELEASED: _E.RELEASED,
            _E.RELEASE_DUE: _E.RELEASED,
        },
        "admitted": {_E.OPENED: _E.ADMITTED, _E.ADMITTED: _E.ADMITTED, _E.RELEASED: _E.RELEASED},
        "release": {
            _E.ABSENT: _E.RELEASE_DUE,
            _E.RELEASE_DUE: _E.RELEASE_DUE,
            **dict.fromkeys(_OPEN_LEG, _E.RELEASED),
        },
    },
    dict.fromkeys(("declared", "layers written", "layers withdrawn", "sampled"), _OPEN_LEG),
)

_C = PeerPhase
PREFILL_PEER = Table(
    "P's peer",
    {
        "ANNOUNCE": {**dict.fromkeys(_C, _C.ANNOUNCED), _C.REGISTERED: _C.REGISTERED},
        "REGISTER": dict.fromkeys(_C, _C.REGISTERED),
        "other message": {
            _C.SILENT: _C.HEARD,
            **{phase: phase for phase in (_C.HEARD, _C.ANNOUNCED, _C.REGISTERED)},
        },
    },
    {},
)

# ---------------------------------------------------------------- D

_D = DecodePhase
_UNREACHED = {
    _D.WAITING: _D.CANCEL_DUE,
    _D.PLACED: _D.CANCEL_DUE,
    _D.ANNOUNCED: _D.WITHDRAWN,
    _D.ADMITTED: _D.WITHDRAWN,
}
DECODE = Table(
    "D's machine",
    {
        "place": {
            _D.WAITING: _D.PLACED,
            _D.ANNOUNCED: _D.REGISTERED,
            _D.ADMITTED: _D.REGISTERED,
        },
        "reach": {_D.WAITING: _D.ANNOUNCED, _D.PLACED: _D.REGISTERED, _D.CANCEL_DUE: _D.FAILED},
        "admit": {_D.ANNOUNCED: _D.ADMITTED},
        "read": {_D.REGISTERED: _D.READING, _D.CHECKING: _D.READING},
        "check": {_D.REGISTERED: _D.CHECKING, _D.REPAIRING: _D.CHECKING, _D.READING: _D.CHECKING},
        "repair": {_D.CHECKING: _D.REPAIRING},
        "read done": {_D.CHECKING: _D.READ},
        "commit": {_D.CHECKING: _D.DONE, _D.READ: _D.DONE},
        "finish": dict.fromkeys((_D.ANNOUNCED, _D.ADMITTED, _D.REGISTERED, _D.REPAIRING), _D.DONE),
        "fail (push)": {
            **_UNREACHED,
            _D.REGISTERED: _D.CLOSING,
            _D.REPAIRING: _D.CLOSING,
            _D.CHECKING: _D.STOPPING,
        },
        "fail (pull)": {
            **_UNREACHED,
            **dict.fromkeys((_D.REGISTERED, _D.READING, _D.CHECKING, _D.READ), _D.STOPPING),
        },
        "quiet": dict.fromkeys((_D.WITHDRAWN, _D.CLOSING, _D.STOPPING), _D.FAILED),
    },
    {
        **dict.fromkeys(
            (
                *("peer ready", "digests checked", *_ENDS),
                *("ADMITTED", "PROGRESS", "COMMIT", "READY", "CONFIRM", "FINISHED", "NACK"),
            ),
            _D,
        ),
        "placed": (_D.WAITING, _D.ANNOUNCED, _D.ADMITTED, _D.WITHDRAWN, _D.CANCEL_DUE, _D.FAILED, _D.DONE),
    },
)
