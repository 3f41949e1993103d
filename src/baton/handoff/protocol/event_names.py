"""Names of events in the transition tables and in the history of an attempt."""

from __future__ import annotations

from functools import cache

from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import AttemptMessage

_NAMES: dict[type[ev.MachineEvent], str] = {
    ev.Opened: "opened",
    ev.PagesGiven: "admitted",
    ev.Declared: "declared",
    ev.LayersWritten: "layers written",
    ev.LayersWithdrawn: "layers withdrawn",
    ev.Sampled: "sampled",
    ev.PeerReady: "peer ready",
    ev.Placed: "placed",
    ev.CopyEnded: "copy ended",
    ev.DigestsComputed: "digests computed",
    ev.DigestsChecked: "digests checked",
    ev.Fault: "fault",
    ev.Abort: "abort",
    ev.Deadline: "deadline",
    ev.Tick: "tick",
    ev.PeerLost: "peer lost",
}


@cache
def _kind_of(message: type[AttemptMessage]) -> str:
    return str(message.__struct_config__.tag)


def name_of(event: ev.MachineEvent) -> str:
    if isinstance(event, ev.Received):
        return _kind_of(type(event.message))
    return _NAMES[type(event)]
