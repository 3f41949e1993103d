"""The state of a router as text, for `baton status` and `baton top`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any
from unicodedata import combining, east_asian_width

ALARM = "ALARM: "
_INDENT = " " * len(ALARM)


def status_text(state: Mapping[str, Any]) -> str:
    """`/status`, or an event of the dashboard, which also has latencies and errors. Servers' control characters, which
    could change the terminal or begin a line, become `?`.

    Raises `LookupError`, `TypeError`, `ValueError`, `AttributeError` or `OverflowError` for anything else.
    """
    state = _printable(state)
    alarms = (f"{ALARM}{alarm}" for alarm in state["alarms"])
    parts = [_head(state), *alarms, _engines(state["engines"]), _routes(state), *_more(state)]
    parts += [*_errors(state), *_acceptance(state)]
    return "\n".join(parts)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value)
    if isinstance(value, Mapping):
        return {_printable(name): _printable(part) for name, part in value.items()}
    return [_printable(part) for part in value] if isinstance(value, list | tuple) else value


def fit_to_terminal(text: str, columns: int, lines: int) -> str:
    """Alarms are wrapped, since their ends name the fault; other lines are cut."""
    rows = [
        row
        for line in text.splitlines()
        for row in (wrap(line, columns, subsequent_indent=_INDENT) if line.startswith(ALARM) else [line])
    ]
    if len(rows) > lines:
        rows = [*rows[: lines - 1], f"... {len(rows) - lines + 1} more lines"]
    return "\n".join(_fit(row, columns) for row in rows)


def _fit(row: str, columns: int) -> str:
    """The beginning that fits. East Asian characters take two columns, combining ones none."""
    for index, character in enumerate(row):
        columns -= 0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1
        if columns < 0:
            return row[:index]
    return row


def _head(state: Mapping[str, Any]) -> str:
    engines = state["engines"]
    healthy = sum(bool(engine["healthy"]) for engine in engines)
    ready = "ready" if state["ready"] else "NOT READY"
    model = f", model {state['model']}" if state.get("model") else ""
    return f"{ready}: {healthy} of {len(engines)} engines can be used{model}"


def _engines(engines: Sequence[Mapping[str, Any]]) -> str:
    rows = [("engine", "role", "health", "legs", "running", "waiting", "KV", "handoffs")]
    for engine in engines:
        load = engine["load"] or {}
        info = engine["info"] or {}
        health = "draining" if engine["draining"] else "healthy" if engine["healthy"] else "not usable"
        usage = f"{load['kv_usage']:.1%}" if load else "-"
        counts = (str(load.get(name, "-")) for name in ("num_running", "num_waiting"))
        legs, handoffs = str(engine["num_inflight"]), str(load.get("num_handoffs", "-"))
        name = str(info.get("engine_id", engine["url"]))
        rows.append((name, engine["role"], health, legs, *counts, usage, handoffs))
    return "\n".join(["", *_table(rows, num_texts=3), ""])


def _routes(state: Mapping[str, Any]) -> str:
    handoffs = state["handoffs"]
    failures = ", ".join(f"{reason} {count}" for reason, count in handoffs["failures"].items())
    recoveries = ", ".join(f"{rung} {count}" for rung, count in state["recoveries"].items())
    lines = [
        f"routes: {state['decisions']['summary']}",
        f"handoffs: {handoffs['active']} in progress, {handoffs['completed']} completed, {handoffs['failed']} failed"
        + (f" ({failures})" if failures else ""),
    ]
    return "\n".join([*lines, *([f"recoveries: {recoveries}"] if recoveries else [])])


def _acceptance(state: Mapping[str, Any]) -> Iterable[str]:
    rows = [("acceptance by position", "route", "requests", "first verification", "later ones")]
    for group in state["acceptance"]["groups"]:
        pair = f"{group['prefill']} to {group['decode']}" if group["prefill"] else group["decode"]
        first, later = (
            " ".join(f"{share:4.0%}" for share in group[part]["acceptance_per_pos"]) or "-"
            for part in ("first_verification", "later_verifications")
        )
        rows.append((pair, str(group["route"]).replace("_", " "), str(group["num_requests"]), first, later))
    if len(rows) > 1:
        yield "\n".join(["", *_table(rows, num_texts=2)])


def _more(state: Mapping[str, Any]) -> Iterable[str]:
    if "stages" not in state:
        return
    yield "in flight: " + ", ".join(f"{stage} {count}" for stage, count in state["stages"].items())
    for kind, name in (("handed_off", "handed off"), ("local", "one engine")):
        points = [point for point in state["latency"][kind] if point["ttft_ms"] is not None]
        if points:
            last = points[-1]
            tpot = "-" if last["tpot_ms"] is None else f"{last['tpot_ms']:.2f} ms"
            wait = last["handoff_ms"]
            second = "" if wait is None else f", second token after {wait:.1f} ms"
            latency = f"TTFT {last['ttft_ms']:.1f} ms{second}, TPOT {tpot}"
            yield f"{name}: {latency} (medians of {last['num_requests']} requests)"


def _errors(state: Mapping[str, Any]) -> Iterable[str]:
    for error in state.get("errors", ())[:5]:
        yield f"error: {error['id']}: {error['error']}"


def _table(rows: Sequence[Sequence[str]], num_texts: int) -> list[str]:
    """Columns after the first `num_texts` are numbers, aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    sides = ["<"] * num_texts + [">"] * (len(widths) - num_texts)
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
