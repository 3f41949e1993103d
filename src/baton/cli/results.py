"""Tables and JSON files of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.errors import ConfigError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
OutputJson = Annotated[str | None, typer.Option(help="Write a JSON file too.")]


def show_table(rows: Sequence[dict[str, Any]]) -> None:
    cells = [[*rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))


def make_place(path: str | Path, field: str) -> None:
    """Creates its directories. Raises `ConfigError`."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(field, f"cannot write {path}: {error.strerror}") from None
    if Path(path).is_dir():
        raise ConfigError(field, f"{path} is a directory")


def write_json(path: str, what: Any) -> None:
    """Raises `ConfigError`."""
    try:
        Path(path).write_text(json.dumps(what))
    except OSError as error:
        raise ConfigError("output_json", f"cannot write {path}: {error.strerror}") from None


def parse_list(text: str, field: str, most: int) -> list[int]:
    """Whole numbers such as `512,2048`, from 1 to `most`. Raises `ConfigError` for `field`."""
    values = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 20 and 1 <= int(part) <= most for part in values):
        raise ConfigError(field, f"must be whole numbers from 1 to {most}, such as 512,2048, got {text!r}")
    return [int(part) for part in values]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None else str(value)
