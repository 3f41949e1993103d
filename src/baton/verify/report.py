"""The output of `baton verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.verify.acceptance_check import Acceptance, AcceptanceCheck
from baton.verify.compare import Report

MAX_SHOWN = 5


def format_reports(reports: Sequence[Report]) -> str:
    """A table, the first differences, and a last line `identical: N/N`."""
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
        lines += _check_lines(report)
        for title, found in (("near-tie", report.near_ties), ("DIFFERENT", report.differences)):
            shown = found[:MAX_SHOWN]
            lines += [f"{title} {report.mode}: {difference}" for difference in shown]
            if len(found) > len(shown):
                lines.append(f"{title} {report.mode}: and {len(found) - len(shown)} more")
    identical = sum(report.num_identical for report in reports)
    near_ties = sum(len(report.near_ties) for report in reports)
    last = f"identical: {identical}/{sum(report.num_cases for report in reports)}"
    lines.append(f"{last}, parted at near-ties of the reference: {near_ties}" if near_ties else last)
    return "\n".join(lines)


def report_json(report: Report) -> dict[str, Any]:
    check = report.check
    return {
        "mode": report.mode,
        "requests": report.num_cases,
        "identical": report.num_identical,
        "near_ties": [str(near_tie) for near_tie in report.near_ties],
        "differences": [str(difference) for difference in report.differences],
        "max_logprob_difference": report.max_logprob_difference,
        "acceptance": report.acceptance,
        "reference_acceptance": report.reference_acceptance,
        "counts": _counts(check.candidate),
        "reference_counts": _counts(check.reference),
        "acceptance_compared": check.compared,
        "acceptance_problem": check.problem,
        "passed": report.passed,
    }


def _counts(found: Acceptance | None) -> dict[str, Any] | None:
    return {"rounds": found.num_drafts, "accepted_per_position": list(found.accepted)} if found else None


def _check_lines(report: Report) -> list[str]:
    check = report.check
    if check.compared:
        lines = [_counts_line(report.mode, check)]
        if check.problem is not None:
            lines.append(f"DIFFERENT {report.mode}: {check.problem}")
        return lines + _extra_lines(report)
    if check.problem is not None:
        title = "DIFFERENT" if check.failed else "note"
        return [f"{title} {report.mode}: acceptance not compared: {check.problem}"]
    return []


def _counts_line(mode: str, check: AcceptanceCheck) -> str:
    assert check.candidate is not None
    assert check.reference is not None
    have, want = check.candidate, check.reference
    verdict = "equal" if check.equal else "too far apart" if check.failed else "within the tolerance"
    return (
        f"acceptance {mode}: accepted {_numbers(have.accepted)} in {have.num_drafts} rounds, "
        f"reference {_numbers(want.accepted)} in {want.num_drafts}: {verdict}"
    )


def _extra_lines(report: Report) -> list[str]:
    check = report.check
    assert check.candidate is not None
    assert check.reference is not None
    extra = check.candidate.num_drafts - check.reference.num_drafts
    if not extra or check.failed:
        return []
    more, than = ("candidate", "reference") if extra > 0 else ("reference", "candidate")
    return [
        f"note {report.mode}: the {more} counts {abs(extra)} rounds more than the {than}, for {report.num_cases} "
        "requests. vLLM counts one round of placeholder drafts, all rejected, per request that was handed over; so "
        "accepted drafts are compared, not rates"
    ]


def _numbers(counts: Sequence[int]) -> str:
    return " ".join(str(count) for count in counts)


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.6f}" for rate in rates) or "-"
