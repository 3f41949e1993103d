"""`python -m tools.pictures`: write the SVG pictures of the documents into docs/pictures.

The machines are drawn from their transition tables, pages and intervals from a real `KVCache`, and messages
are named by their structs. A test compares the files with what this script makes.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.transitions import DECODE, PREFILL, Table
from baton.kv.block_tables import BlockTables
from baton.kv.cache import KVCache
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes

FOLDER = Path(__file__).parents[1] / "docs/pictures"
INK, GREY, BLUE, GREEN, RED, AMBER, WHITE = "#1f2933", "#7b8794", "#d6e4f5", "#d9eedb", "#f9dcd9", "#fbeccb", "#ffffff"
Point = tuple[float, float]


class Picture:
    """SVG text of a fixed size, on white."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' font-family="sans-serif" font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="10" markerHeight="10"'
            ' markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{WHITE}"/>',
        ]

    def text(self, at: Point, text: str, *, anchor: str = "middle", size: int = 13, bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}" font-size="{size}"{weight} stroke="{WHITE}"'
            f' stroke-width="4" stroke-linejoin="round" paint-order="stroke">{escape(text)}</text>'
        )

    def box(
        self, at: Point, size: Point, lines: Iterable[str] = (), fill: str = WHITE, *, dashed: bool = False
    ) -> None:
        """A rectangle with its corner at `at`, and centred lines of text."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{at[0]:g}" y="{at[1]:g}" width="{size[0]:g}" height="{size[1]:g}" rx="4" fill="{fill}"'
            f' stroke="{GREY}"{dash}/>'
        )
        lines = list(lines)
        for i, line in enumerate(lines):
            middle = at[1] + size[1] / 2 + 4.5 + (i - (len(lines) - 1) / 2) * 17
            self.parts.append(
                f'<text x="{at[0] + size[0] / 2:g}" y="{middle:g}" text-anchor="middle">{escape(line)}</text>'
            )

    def arrow(
        self, start: Point, end: Point, label: str = "", *, bend: float = 0, dashed: bool = False, wide: bool = False
    ) -> None:
        """`bend` moves the middle of the line to its left, in pixels."""
        (x, y), (u, v) = start, end
        length = ((u - x) ** 2 + (v - y) ** 2) ** 0.5
        middle = ((x + u) / 2 + bend * (v - y) / length, (y + v) / 2 - bend * (u - x) / length)
        control = (2 * middle[0] - (x + u) / 2, 2 * middle[1] - (y + v) / 2)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="M{x:g} {y:g}Q{control[0]:.1f} {control[1]:.1f} {u:g} {v:g}" fill="none" stroke="{INK}"'
            f' stroke-width="{3 if wide else 1.3}"{dash} marker-end="url(#tip)"/>'
        )
        for i, line in enumerate(label.split("\n") if label else []):
            self.text((middle[0], middle[1] - 6 + 21 * i), line, size=12)

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def name(message: type[msg.ControlMessage]) -> str:
    return str(message.__struct_config__.tag)


# ------------------------------------------------------------------ processes and threads

THREADS = ("event loop: HTTP", "engine thread: requests, pages, tensors", "agent thread: machines, sockets",
           "digests", "transport: copies")  # fmt: skip


def processes() -> str:
    picture = Picture(960, 430, "A client, a router, a prefill engine and a decode engine")
    picture.box((20, 40), (110, 50), ["client"])
    picture.box((330, 30), (300, 70), ["router", "tickets, legs joined into one stream"], AMBER)
    picture.arrow((130, 56), (330, 56), "POST /v1/chat/completions")
    picture.arrow((330, 80), (130, 80), "one stream", dashed=True)
    for left, title, fill in ((40, "prefill engine (P)", BLUE), (600, "decode engine (D)", GREEN)):
        picture.box((left, 180), (320, 230), (), fill)
        picture.text((left + 160, 203), title, bold=True)
        for i, thread in enumerate(THREADS):
            picture.box((left + 20, 214 + 37 * i), (280, 30), [thread])
    picture.arrow((400, 100), (190, 180), "signed ticket", bend=-14)
    picture.arrow((250, 180), (450, 100), "first token", bend=-14, dashed=True)
    picture.arrow((560, 100), (770, 180), "signed ticket", bend=14)
    picture.arrow((710, 180), (510, 100), "all other tokens", bend=14, dashed=True)
    picture.arrow((620, 294), (340, 294), f"{name(msg.Announce)}, {name(msg.Register)}, {name(msg.Ack)}")
    picture.arrow((340, 312), (620, 312), "")
    picture.text((480, 328), f"{name(msg.Admitted)}, {name(msg.Commit)}: first token, drafts", size=12)
    picture.arrow((340, 377), (620, 377), "KV of target and drafter", wide=True)
    return picture.done()


# ------------------------------------------------------------------ push and pull in time

Step = tuple[str, str, str]
BEGIN: list[Step] = [
    ("D", name(msg.Announce), "D has the leg"),
    ("P", name(msg.Admitted), "P has pages for the whole prompt"),
]
PUSH: list[Step] = [
    *BEGIN,
    ("D", name(msg.Register), "wanted intervals, D's pages"),
    ("copy", "P writes chunk 1", "while chunk 2 computes"),
    ("copy", "P writes chunk 2", "target's entries"),
    ("on P", "first token sampled and sent; drafter runs", ""),
    ("copy", "P writes the last entries", "final with the drafter"),
    ("P", name(msg.Commit), "all copies are visible; seeds"),
    ("on D", "coverage and digests checked: committed", ""),
    ("D", name(msg.Ack), "P frees its pages"),
    ("on D", "first step verifies the drafts", ""),
]
PULL: list[Step] = [
    *BEGIN,
    ("D", name(msg.Register), "wanted intervals"),
    ("on P", "chunks computed, first token sent; drafter runs", ""),
    ("P", name(msg.Ready), "the prefill is over; P's pages"),
    ("copy", "D reads", "all wanted intervals"),
    ("on D", "digests checked", ""),
    ("D", name(msg.ReadDone), "all reads ended"),
    ("P", name(msg.Confirm), "the pages were P's all the time; seeds"),
    ("on D", "committed", ""),
    ("D", name(msg.Ack), "P frees its pages"),
    ("on D", "first step verifies the drafts", ""),
]


def timeline() -> str:
    picture = Picture(
        960, 90 + 46 * max(len(PUSH), len(PULL)), "A handoff in push and in pull mode, from top to bottom"
    )
    for left, mode, steps in ((20, "push", PUSH), (500, "pull", PULL)):
        p, d, top = left + 50, left + 390, 60
        picture.text((left + 220, 24), mode, bold=True, size=15)
        for x, side in ((p, "P"), (d, "D")):
            picture.text((x, 48), side, bold=True)
            picture.parts.append(f'<path d="M{x} 56V{top + 46 * len(steps)}" stroke="{GREY}"/>')
        for i, (kind, what, note) in enumerate(steps):
            y = top + 30 + 46 * i
            if kind.startswith("on"):
                x = p if kind == "on P" else d
                fill, width = (BLUE, 320) if kind == "on P" else (GREEN, 284)
                picture.box((x - 30 if x == p else x + 30 - width, y - 16), (width, 26), [what], fill)
                continue
            start, end = (p, d) if kind == "P" or what.startswith("P") else (d, p)
            if what == "D reads":
                start, end = p, d
            picture.arrow((start, y), (end, y), what, wide=kind == "copy")
            picture.text(((p + d) / 2, y + 15), note, size=11)
    return picture.done()


# ------------------------------------------------------------------ the two machines

SIZE = (112, 32)
TABLES: dict[str, Table[Any]] = {"P": PREFILL, "D": DECODE}
PLACES: dict[str, dict[str, Point]] = {
    "P": {
        "open": (90, 130), "ending": (270, 75), "ended": (450, 75), "finished": (630, 75), "committed": (450, 130),
        "ready": (340, 200), "confirmed": (560, 200), "closed": (860, 130),
        "stopping": (860, 270), "awaiting reader": (560, 270), "awaiting ACK": (720, 270),
    },
    "D": {
        "waiting": (75, 450), "placed": (240, 540), "announced": (240, 450), "admitted": (400, 450),
        "registered": (560, 450), "reading": (640, 380), "checking": (730, 450), "repairing": (640, 540),
        "read": (820, 380), "done": (890, 450), "withdrawn": (400, 620), "closing": (400, 670),
        "stopping": (400, 720), "cancel due": (890, 620), "failed": (700, 670),
    },
}  # fmt: skip
BENDS = {
    ("P", "open", "committed"): 10, ("P", "committed", "open"): 10,
    ("D", "announced", "registered"): 52, ("D", "announced", "done"): 150, ("D", "admitted", "done"): 135,
    ("D", "registered", "done"): 120, ("D", "reading", "checking"): 12, ("D", "checking", "reading"): 12,
    ("D", "repairing", "checking"): 12, ("D", "checking", "repairing"): 12,
}  # fmt: skip
COLOURS = {
    **dict.fromkeys(("stopping", "awaiting reader", "awaiting ACK", "withdrawn", "closing"), AMBER),
    **dict.fromkeys(("failed", "cancel due"), RED),
}


def edge(centre: Point, other: Point) -> Point:
    """Where the line from the centre of a box to `other` leaves the box."""
    x, y = other[0] - centre[0], other[1] - centre[1]
    scale = min((SIZE[0] / 2 + 2) / abs(x) if x else 9e9, (SIZE[1] / 2 + 2) / abs(y) if y else 9e9)
    return centre[0] + x * scale, centre[1] + y * scale


def machines() -> str:
    """Raises `KeyError` for a phase without a place."""
    picture = Picture(960, 780, "The machines of P and D: phases, and the steps between them")
    for side, top in (("P", 40), ("D", 340)):
        picture.text((24, top), side, bold=True, size=16)
        places = PLACES[side]
        found: dict[tuple[str, str], list[str]] = {}
        for step, row in TABLES[side].steps.items():
            for before, after in row.items():
                if not step.startswith("fail"):
                    found.setdefault((before.value, after.value), []).append(step)
        for (before, after), names in found.items():
            a, b = places[before], places[after]
            bend = BENDS.get((side, before, after), 0)
            start, end = edge(a, b), edge(b, a)
            if abs(bend) > 40:
                start, end = (a[0], a[1] - 19), (b[0], b[1] - 19)
            picture.arrow(start, end, ", ".join(names), bend=bend, dashed=names == ["quiet"])
        for phase, (x, y) in places.items():
            fill = COLOURS.get(phase, BLUE if side == "P" else GREEN)
            picture.box((x - SIZE[0] / 2, y - SIZE[1] / 2), SIZE, [phase], fill)
    note = "From every phase but closed, failed, cancel due and done, a failure leads to a phase in amber or red."
    picture.text((480, 764), note, size=12)
    return picture.done()


# ------------------------------------------------------------------ group, page, interval

NUM_TOKENS, NUM_DRAFTS = 10, 3
PLANES = kv_planes(2, 8, "float32")
GROUPS = [
    GroupSpec(name="target", owner="target", kind="full", planes=PLANES, page_size=4, layer_ids=(0, 1)),
    GroupSpec(
        name="window", owner="target", kind="sliding_window", window=5, planes=PLANES, page_size=4, layer_ids=(2,)
    ),
    GroupSpec(name="draft", owner="draft", kind="full", module=1, planes=PLANES, page_size=3, layer_ids=(3,)),
]
LEGEND = (
    (20, BLUE, "wanted, target"),
    (170, GREEN, "wanted, drafter"),
    (325, AMBER, "lookahead: next token and drafts, in no interval"),
    (670, WHITE, "not needed"),
)


def pages() -> str:
    tables = BlockTables()
    cache = KVCache(GROUPS, dict.fromkeys((group.name for group in GROUPS), 40), NUM_DRAFTS, lambda *_: None)
    destination = cache.attach_destination(tables, range(NUM_TOKENS), NUM_TOKENS)
    assert destination is not None
    picture = Picture(960, 430, "Three groups of a request: pages, slots, and the intervals that a handoff moves")
    heading = f"A prompt of {NUM_TOKENS} tokens and {NUM_DRAFTS} drafts on a decode engine that holds none of it"
    picture.text((20, 26), heading, anchor="start", bold=True)
    cell, left = 40, 240
    for i, group in enumerate(GROUPS):
        y = 56 + 120 * i
        kind = f"window of {group.window}" if group.window else "full attention" if not group.module else "EAGLE"
        picture.text((20, y + 28), f"group {group.name}", anchor="start", bold=True)
        picture.text((20, y + 46), f"{kind}, {group.page_size} tokens a page", anchor="start", size=12)
        wanted = destination.wanted[group.name]
        colour = BLUE if group.owner == "target" else GREEN
        for index, page in enumerate(tables.pages[group.name]):
            x, width = left + index * group.page_size * cell, group.page_size * cell
            picture.text((x + width / 2, y + 10), f"page {page}" if page else "null page", size=12)
            for slot in range(group.page_size):
                position = index * group.page_size + slot
                inside = wanted.start <= position < wanted.stop
                fill = colour if inside else AMBER if position >= NUM_TOKENS else WHITE
                picture.box((x + slot * cell, y + 16), (cell, 30), [str(position)], fill, dashed=not page)
            frame = f'<rect x="{x}" y="{y + 16}" width="{width}" height="30" fill="none"'
            picture.parts.append(f'{frame} stroke="{INK}" stroke-width="2"/>')
        bracket(picture, left, cell, y + 54, wanted)
    for x, fill, text in LEGEND:
        picture.box((x, 404), (18, 14), (), fill)
        picture.text((x + 25, 415), text, anchor="start", size=12)
    return picture.done()


def bracket(picture: Picture, left: int, cell: int, y: int, wanted: Interval) -> None:
    start, stop = left + wanted.start * cell, left + wanted.stop * cell
    picture.parts.append(f'<path d="M{start + 2} {y}v6H{stop - 2}v-6" fill="none" stroke="{INK}"/>')
    picture.text(((start + stop) / 2, y + 22), f"wanted {wanted}", size=12)


PICTURES = {"processes": processes, "timeline": timeline, "machines": machines, "pages": pages}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for file, draw in PICTURES.items():
        (FOLDER / f"{file}.svg").write_text(draw())


if __name__ == "__main__":
    main()
