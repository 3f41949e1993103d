"""Checks that the messages of the longest prompt fit into frames."""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import ConfigError
from baton.handoff.plan.topology import RankGeometry
from baton.handoff.protocol.digests import SAMPLED_SHARE, cells_of
from baton.handoff.protocol.frames import MAX_TABLES_BYTES
from baton.handoff.protocol.messages import DIGEST_BYTES, MAX_PAGES, PIECE_TOKENS
from baton.kv.interval import Rules
from baton.wire import Integrity

# Bytes of: a page id, the null page, a digest without hashes, a group without its name.
_PAGE_ID, _NULL_PAGE, _PIECE, _GROUP = 5, 1, 14, 64
_SHORT = 255  # longer hashes have a longer header
_OTHER = 128 * 1024  # ticket or seeds


def message_bytes(
    num_tokens: int,
    rules: Mapping[str, Rules],
    geometries: Mapping[str, RankGeometry],
    tables: Mapping[str, str],
    integrity: Integrity,
) -> int:
    """Upper bound, in bytes, of the message with a request's block tables. `tables`: by group, the name of its block
    table.

    It omits pieces that chunks cut: a message that is still too large fails its request.
    """
    table_bytes: dict[str, int] = {}
    others = _OTHER
    for group, rule in rules.items():
        geometry = geometries[group].geometry
        count = rule.num_pages(num_tokens, geometry.page_size)
        used = min(count, geometry.num_pages)
        size = used * _PAGE_ID + (count - used) * _NULL_PAGE
        table_bytes[tables[group]] = max(table_bytes.get(tables[group], 0), size)
        others += 4 * len(group) + _GROUP
        if integrity != "off":
            pieces = -(-len(rule.wanted(num_tokens, 0)) // PIECE_TOKENS) + 1
            due = pieces if integrity == "full" else -(-pieces // SAMPLED_SHARE) + 1
            hashes = DIGEST_BYTES * len(cells_of(geometry))
            others += due * (_PIECE + hashes + (hashes > _SHORT))
    return sum(table_bytes.values()) + others


def check_messages(
    max_tokens: int,
    rules: Mapping[str, Rules],
    geometries: Mapping[str, RankGeometry],
    tables: Mapping[str, str],
    integrity: Integrity,
) -> None:
    """Raise `ConfigError` if messages of `max_tokens` tokens, or of as many as the pages hold, are too large."""
    whole = [geometries[group].geometry for group, rule in rules.items() if rule.kind in ("full", "mla")]
    longest = min([max_tokens, *(each.num_pages * each.page_size for each in whole)])
    needed = message_bytes(longest, rules, geometries, tables, integrity)
    most = max((-(-longest // each.page_size) for each in whole), default=0)
    if needed <= MAX_TABLES_BYTES and most <= MAX_PAGES:
        return
    digests = "" if integrity == "off" else f" and digests (integrity {integrity})"
    problem = f"block tables{digests} of a prompt of {longest} tokens need {needed} bytes and {most} pages"
    advice = "use larger pages, fewer digests or a shorter context"
    raise ConfigError("page_size", f"{problem}, a message has {MAX_TABLES_BYTES} and {MAX_PAGES}: {advice}")
