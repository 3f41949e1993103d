"""`python -m tools.phase_tables`: what the two machines of an attempt do on each event in each phase.

Writes the tables into docs/protocol.md, which a test compares with the machines.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

from baton.errors import ProtocolError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.messages import AttemptKey, PieceDigest, Seeds
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.kv.interval import Interval
from baton.wire import Mode

DOC = Path(__file__).parents[1] / "docs" / "protocol.md"
KEY = AttemptKey(bytes(16), 0, "p", "d")
SEEDS = Seeds(7, None, [8])
WANTED = {"target": Interval(0, 8)}
P_PAGES, D_PAGES = {"target": [1, 2]}, {"target": [8, 9]}
FINAL = {"target": 8}
DIGESTS = {"target": [PieceDigest(Interval(0, 8), b"x" * 8)]}
Machine = PrefillHandoff | DecodeHandoff
Modes = dict[str, tuple[ev.MachineEvent, ...]]  # the events that bring a new machine into each phase


def received(message: msg.AttemptMessage) -> ev.Received:
    return ev.Received(message)


REGISTER = received(msg.Register(KEY, ticket="t", wanted=WANTED, pages=D_PAGES))
DECLARED, SAMPLED = ev.Declared(8, P_PAGES, FINAL), ev.Sampled(SEEDS, False, FINAL)
COPIED, GONE = ev.CopyEnded(0, ok=True), ev.Abort("aborted")
DIGESTED = ev.DigestsComputed("target", DIGESTS["target"])
ENDS: dict[str, ev.MachineEvent] = {
    "copy ended": COPIED,
    "copy failed": ev.CopyEnded(0, ok=False),
    "abort": GONE,
    "deadline": ev.Deadline(),
    "fault": ev.Fault("transfer_failed", ""),
    "peer lost": ev.PeerLost("peer_lost", "", fenced=False),
    "peer fenced": ev.PeerLost("peer_lost", "", fenced=True),
    "tick": ev.Tick(),
    "CANCEL": received(msg.Cancel(KEY, "aborted")),
    "CANCELLED": received(msg.Cancelled(KEY, "aborted")),
}
P_EVENTS: dict[str, ev.MachineEvent] = {
    "opened": ev.Opened(),
    "admitted": ev.PagesGiven(),
    "declared": DECLARED,
    "sampled": SAMPLED,
    "sampled, the last": ev.Sampled(SEEDS, True, FINAL),
    "digests computed": DIGESTED,
    "ANNOUNCE": received(msg.Announce(KEY, ticket="t")),
    "REGISTER": REGISTER,
    "READ_DONE": received(msg.ReadDone(KEY)),
    "REPAIR": received(msg.Repair(KEY, 1, {"target": [Interval(0, 8)]})),
    "ACK": received(msg.Ack(KEY)),
    **ENDS,
}
D_EVENTS: dict[str, ev.MachineEvent] = {
    "peer ready": ev.PeerReady(),
    "placed": ev.Placed(WANTED, D_PAGES),
    "digests match": ev.DigestsChecked(0),
    "digests differ": ev.DigestsChecked(0, (ev.BadPiece("target", Interval(0, 8), ((0, "k"),)),)),
    "ADMITTED": received(msg.Admitted(KEY)),
    "PROGRESS": received(msg.Progress(KEY, DIGESTS)),
    "COMMIT": received(msg.Commit(KEY, final=FINAL, seeds=SEEDS, digests=DIGESTS)),
    "READY": received(msg.Ready(KEY, final=FINAL, pages=P_PAGES, digests=DIGESTS)),
    "CONFIRM": received(msg.Confirm(KEY, SEEDS)),
    "FINISHED": received(msg.Finished(KEY, SEEDS)),
    "NACK": received(msg.Nack(KEY, "register_refused")),
    **ENDS,
}
OPEN = (ev.Opened(), ev.PagesGiven(), received(msg.Announce(KEY, ticket="t")), REGISTER, DECLARED)
PLACED = (ev.PeerReady(), ev.Placed(WANTED, D_PAGES))
P_PATHS: dict[Mode, Modes] = {
    "push": {
        "open": OPEN,
        "offered": (*OPEN, DIGESTED, COPIED, SAMPLED),
        "closing": (*OPEN, GONE),
        "closed": (*OPEN, COPIED, GONE),
    },
    "pull": {
        "open": OPEN,
        "offered": (*OPEN, DIGESTED, SAMPLED),
        "closing": (*OPEN, DIGESTED, SAMPLED, GONE),
        "closed": (*OPEN, GONE),
    },
}
COMMIT, READY, MATCH = D_EVENTS["COMMIT"], D_EVENTS["READY"], D_EVENTS["digests match"]
D_PATHS: dict[Mode, Modes] = {
    "push": {
        "waiting": (),
        "announced": PLACED[:1],
        "registered": PLACED,
        "checking": (*PLACED, COMMIT),
        "closing": (*PLACED, GONE),
        "failed": (*PLACED, GONE, ENDS["CANCELLED"]),
        "done": (*PLACED, COMMIT, MATCH),
    },
    "pull": {
        "waiting": (),
        "announced": PLACED[:1],
        "registered": PLACED,
        "reading": (*PLACED, READY),
        "checking": (*PLACED, READY, COPIED),
        "read": (*PLACED, READY, COPIED, MATCH),
        "closing": (*PLACED, READY, GONE),
        "failed": (*PLACED, GONE),
        "done": (*PLACED, READY, COPIED, MATCH, D_EVENTS["CONFIRM"]),
    },
}


def p_machine(mode: Mode) -> PrefillHandoff:
    return PrefillHandoff(KEY, mode, "t", ["target"], integrity="full")


def d_machine(mode: Mode) -> DecodeHandoff:
    made = DecodeHandoff(KEY, mode, "t", integrity="full")
    # The seeds are good: only pages are compared.
    made._seeds_good = lambda _: True  # type: ignore[method-assign]
    return made


SIDES: dict[str, tuple[Callable[[Mode], Machine], dict[Mode, Modes], dict[str, ev.MachineEvent]]] = {
    "P": (p_machine, P_PATHS, P_EVENTS),
    "D": (d_machine, D_PATHS, D_EVENTS),
}


def arrived(make: Callable[[Mode], Machine], mode: Mode, path: tuple[ev.MachineEvent, ...]) -> Machine:
    machine = make(mode)
    for event in path:
        machine.handle(event)
    return machine


def said(action: ev.Action) -> str:
    match action:
        case ev.Send(message):
            return str(message.__struct_config__.tag)
        case ev.StartCopy():
            return "copy"
        case ev.CancelCopies():
            return "cancel copies"
        case ev.ComputeDigests() | ev.CheckDigests():
            return "digest"
        case ev.Count():
            return ""
        case ev.Notify(event):
            return f"*{re.sub('Prefill|Decode', '', type(event).__name__).lower()}*"


def cell(machine: Machine, event: ev.MachineEvent) -> str:
    before = machine.phase
    try:
        words = [word for word in map(said, machine.handle(event)) if word]
    except ProtocolError:
        return "refused"
    if machine.phase is not before:
        words.append(f"→ {machine.phase.value}")
    return ", ".join(words)


def table(side: str, mode: Mode) -> str:
    """Markdown: a row for each event, a column for each phase."""
    make, paths, events = SIDES[side]
    columns = paths[mode]
    lines = [f"{side}, {mode}:", "", f"| event | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, event in events.items():
        cells = [cell(arrived(make, mode, path), copy.deepcopy(event)) for path in columns.values()]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> str:
    return "\n\n".join(table(side, mode) for side in SIDES for mode in SIDES[side][1])


BEGIN, END = "<!-- tables: begin -->\n", "\n<!-- tables: end -->"


def transitions(side: str) -> dict[tuple[str, str], list[str]]:
    """The events that bring a machine from one phase into another, in either mode: by (phase before, phase after)."""
    make, paths, events = SIDES[side]
    found: dict[tuple[str, str], list[str]] = {}

    def handle(machine: Machine, event: ev.MachineEvent, name: str) -> None:
        before = machine.phase
        try:
            machine.handle(copy.deepcopy(event))
        except ProtocolError:
            return
        if machine.phase is not before and name not in found.setdefault((before.value, machine.phase.value), []):
            found[before.value, machine.phase.value].append(name)

    for mode, columns in paths.items():
        for path in columns.values():
            machine = make(mode)
            for event in path:
                handle(
                    machine,
                    event,
                    next(name for name, each in events.items() if type(each) is type(event) and each == event),
                )
            for name, event in events.items():
                handle(copy.deepcopy(machine), event, name)
    return found


if __name__ == "__main__":
    document = DOC.read_text()
    start, stop = document.index(BEGIN) + len(BEGIN), document.index(END)
    DOC.write_text(document[:start] + tables() + document[stop:])
