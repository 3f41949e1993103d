"""The parity matrix as Markdown."""

from __future__ import annotations

from collections import Counter, defaultdict

from benchmarks.parity.cases import ALL_SIZES, CONDITIONS, MODES
from benchmarks.parity.trial import Outcome

_MOST_FAILURES = 20


class Report:
    """Rows of the matrix in order, and totals over all of them."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.failures: list[str] = []
        self._conditions: dict[str, Counter[str]] = defaultdict(Counter)
        self._identical = self._cases = 0

    def add(self, target: str, drafter: str, outcome: Outcome) -> None:
        cells = []
        for mode in MODES:
            for sizes in ALL_SIZES:
                cell = outcome.cells[mode, sizes]
                cells.append(f"{cell.num_identical}/{cell.num_cases}")
                self._identical += cell.num_identical
                self._cases += cell.num_cases
                self.failures += [f"{target}/{drafter}, {sizes}: {failure}" for failure in cell.failures]
        for condition, counts in outcome.conditions.items():
            self._conditions[condition].update(counts)
        rates = [f"{count / outcome.rounds:.2f}" for count in outcome.accepted] if outcome.rounds else ["-"]
        moved = sum(cell.num_bytes for cell in outcome.cells.values())
        back = sum(cell.num_handed_back for cell in outcome.cells.values())
        self._row(target, drafter, *cells, " ".join(rates), f"{moved:,}", f"{back:,}")

    def leave_out(self, target: str, drafter: str, reason: str) -> None:
        self._row(target, drafter, *["-"] * (len(MODES) * len(ALL_SIZES)), reason, "-", "-")

    def _row(self, *columns: str) -> None:
        self.rows.append(f"| {' | '.join(columns)} |")

    def text(self) -> str:
        names = [f"{mode} {sizes}" for mode in MODES for sizes in ALL_SIZES]
        lines = [
            _line(
                *("target", "drafter", *names, "accepted at 1, 2, 3"),
                *("bytes sent, all of them wanted", "prompt tokens handed back"),
            ),
            _line(*["---"] * (len(names) + 5)),
            *self.rows,
            "",
            _line("condition", "what it is", "identical"),
            _line("---", "---", "---"),
        ]
        for condition, meaning in CONDITIONS.items():
            counts = self._conditions[condition]
            lines.append(_line(condition, meaning, f"{counts['identical']}/{counts['all']}"))
        lines += ["", f"identical {self._identical}/{self._cases}"]
        lines += self.failures[:_MOST_FAILURES]
        if len(self.failures) > _MOST_FAILURES:
            lines.append(f"... and {len(self.failures) - _MOST_FAILURES} more")
        return "\n".join(lines)


def _line(*columns: str) -> str:
    return f"| {' | '.join(columns)} |"
