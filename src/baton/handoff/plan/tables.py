"""Block tables by group. Groups with one block table share one list, which is copied and sent once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.errors import ProtocolError


def copy_tables(pages: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The engine's tables grow, so messages get copies."""
    copies: dict[int, list[int]] = {}
    for table in pages.values():
        if id(table) not in copies:
            copies[id(table)] = list(table)
    return {group: copies[id(table)] for group, table in pages.items()}


def share_tables(pages: Mapping[str, list[int]]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Returns each table under its first group, and for the other groups that group. Equal tables count as shared."""
    first: dict[int, str] = {}
    equal: dict[tuple[int, ...], str] = {}
    tables: dict[str, list[int]] = {}
    same: dict[str, str] = {}
    for group, table in pages.items():
        holder = first.get(id(table))
        if holder is None:
            holder = first[id(table)] = equal.setdefault(tuple(table), group)
        if holder == group:
            tables[group] = table
        else:
            same[group] = holder
    return tables, same


def join_tables(tables: Mapping[str, list[int]], same: Mapping[str, str]) -> dict[str, list[int]]:
    """The inverse of `share_tables`. Raises `ProtocolError` for a group with two tables or none."""
    joined = dict(tables)
    for group, holder in same.items():
        if group in tables or holder not in tables:
            raise ProtocolError(f"group {group!r} cannot have the block table of group {holder!r}")
        joined[group] = tables[holder]
    return joined
