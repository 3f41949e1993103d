"""`python -m tools.phase_tables`: the transition tables of the handoff's machines, and what the two machines of an
attempt do on each event in each phase.

Writes them into docs/protocol.md, which a test compares with the tables and the machines.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.engine.legs.leg import LEG
from baton.errors import ProtocolError, UndefinedTransitionError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.messages import AttemptKey, PieceDigest, Seeds
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.handoff.protocol.transitions import DECODE, PREFILL, PREFILL_ENGINE, PREFILL_PEER, Table
from baton.handoff.session.session import SESSION
from baton.kv.interval import Interval
from baton.vllm.legs import BLOCKS, DECODE_LEG, PREFILL_END
from baton.wire import Mode

DOC = Path(__file__).parents[1] / "docs" / "protocol.md"
KEY = AttemptKey(bytes(16), 0, "p", "d")
SEEDS = Seeds(7, None, [8])
WANTED = {"target": Interval(0, 8)}
P_PAGES, D_PAGES = {"target": [1, 2]}, {"target": [8, 9]}
FINAL = {"target": 8}
DIGESTS = {"target": [PieceDigest(Interval(0, 8), b"x" * 8)]}
Machine = PrefillHandoff | DecodeHandoff
# Of an attempt, a session, an engine's leg, and legs in vLLM.
TABLES = (PREFILL, PREFILL_ENGINE, PREFILL_PEER, DECODE, SESSION, LEG, BLOCKS, PREFILL_END, DECODE_LEG)
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
    "COMMIT of the repair": received(msg.Commit(KEY, final=FINAL, seeds=SEEDS, round=1, digests=DIGESTS)),
    "READY": received(msg.Ready(KEY, final=FINAL, pages=P_PAGES, digests=DIGESTS)),
    "CONFIRM": received(msg.Confirm(KEY, SEEDS)),
    "FINISHED": received(msg.Finished(KEY, SEEDS)),
    "NACK": received(msg.Nack(KEY, "register_refused")),
    **ENDS,
}
OPEN = (ev.Opened(), ev.PagesGiven(), received(msg.Announce(KEY, ticket="t")), REGISTER, DECLARED)
LAST = P_EVENTS["sampled, the last"]
PLACED = (ev.PeerReady(), ev.Placed(WANTED, D_PAGES))
P_PATHS: dict[Mode, Modes] = {
    "push": {
        "open": OPEN,
        "committed": (*OPEN, DIGESTED, COPIED, SAMPLED),
        "ending": (*OPEN, LAST),
        "ended": (ev.Opened(), DECLARED, LAST),
        "finished": (*OPEN, COPIED, LAST),
        "stopping": (*OPEN, GONE),
        "closed": (*OPEN, COPIED, GONE),
    },
    "pull": {
        "open": OPEN,
        "ready": (*OPEN, DIGESTED, SAMPLED),
        "confirmed": (*OPEN, DIGESTED, SAMPLED, P_EVENTS["READ_DONE"]),
        "ended": (ev.Opened(), DECLARED, LAST),
        "finished": (*OPEN, LAST),
        "awaiting reader": (*OPEN, DIGESTED, SAMPLED, GONE),
        "awaiting ACK": (*OPEN, DIGESTED, SAMPLED, P_EVENTS["READ_DONE"], GONE),
        "closed": (*OPEN, GONE),
    },
}
COMMIT, READY, MATCH = D_EVENTS["COMMIT"], D_EVENTS["READY"], D_EVENTS["digests match"]
UNREGISTERED: Modes = {
    "waiting": (),
    "placed": PLACED[1:],
    "announced": PLACED[:1],
    "admitted": (ev.PeerReady(), D_EVENTS["ADMITTED"]),
}
D_PATHS: dict[Mode, Modes] = {
    "push": {
        **UNREGISTERED,
        "registered": PLACED,
        "checking": (*PLACED, COMMIT),
        "repairing": (*PLACED, COMMIT, D_EVENTS["digests differ"]),
        "withdrawn": (ev.PeerReady(), GONE),
        "closing": (*PLACED, GONE),
        "cancel due": (GONE,),
        "failed": (*PLACED, GONE, ENDS["CANCELLED"]),
        "done": (*PLACED, COMMIT, MATCH),
    },
    "pull": {
        **UNREGISTERED,
        "registered": PLACED,
        "reading": (*PLACED, READY),
        "checking": (*PLACED, READY, COPIED),
        "read": (*PLACED, READY, COPIED, MATCH),
        "withdrawn": (ev.PeerReady(), GONE),
        "stopping": (*PLACED, READY, GONE),
        "cancel due": (GONE,),
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
    except UndefinedTransitionError:
        return "*error*"
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


def steps(table: Table[Any]) -> str:
    """Markdown: a row for each step, a column for each phase before it, and the phase after it in the cells."""
    before = list(dict.fromkeys(phase for row in table.steps.values() for phase in row))
    columns = sorted(before, key=list(type(before[0])).index)
    names = " | ".join(phase.value for phase in columns)
    lines = [f"{table.machine}:", "", f"| step | {names} |", "|---" * (len(columns) + 1) + "|"]
    for step, row in table.steps.items():
        cells = [row[phase].value if phase in row else "" for phase in columns]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> str:
    parts = [
        steps(each)
        for each in (PREFILL, PREFILL_ENGINE, PREFILL_PEER, DECODE, SESSION, LEG, BLOCKS, PREFILL_END, DECODE_LEG)
    ]
    return "\n\n".join([*parts, *(table(side, mode) for side in SIDES for mode in SIDES[side][1])])


BEGIN, END = "<!-- tables: begin -->\n", "\n<!-- tables: end -->"


if __name__ == "__main__":
    document = DOC.read_text()
    start, stop = document.index(BEGIN) + len(BEGIN), document.index(END)
    DOC.write_text(document[:start] + tables() + document[stop:])
