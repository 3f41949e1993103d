"""The table that `baton verify` prints."""

from __future__ import annotations

from collections.abc import Sequence

from baton.verify.compare import Report

MAX_SHOWN = 5


def format_reports(reports: Sequence[Report]) -> str:
    """Table, first differences, and the last line `identical: N/N`."""
    rows = [("mode", "requests", "identical", "acceptance per position", "reference")]
    for report in reports:
        rows.append(
            (
                report.mode,
                str(report.num_cases),
                str(report.num_identical),
                _rates(report.acceptance),
                _rates(report.reference_acceptance),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for report in reports:
        shown = report.differences[:MAX_SHOWN]
        lines += [f"DIFFERENT {report.mode}: {difference}" for difference in shown]
        if len(report.differences) > len(shown):
            lines.append(f"DIFFERENT {report.mode}: and {len(report.differences) - len(shown)} more")
    identical = sum(report.num_identical for report in reports)
    lines.append(f"identical: {identical}/{sum(report.num_cases for report in reports)}")
    return "\n".join(lines)


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.6f}" for rate in rates) or "-"
