"""Whether the messages about the longest prompt fit into their frames, which an engine checks before it starts."""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import ConfigError
from baton.handoff.plan.topology import RankGeometry
from baton.handoff.protocol.digests import SAMPLED_SHARE, cells_of
from baton.handoff.protocol.frames import MAX_TABLES_BYTES
from baton.handoff.protocol.messages import DIGEST_BYTES, MAX_PAGES, PIECE_TOKENS
from baton.kv.interval import Rules
from baton.wire import Integrity

# In MessagePack: a page id, the null page, a digest without its hashes, and a group's fields without its name.
_PAGE_ID, _NULL_PAGE, _PIECE, _GROUP = 5, 1, 14, 64
_SHORT = 255  # more bytes of hashes have a header that is one byte longer
_OTHER = 128 * 1024  # the ticket, or seeds of a usual size


def message_bytes(
    num_tokens: int,
    rules: Mapping[str, Rules],
    geometries: Mapping[str, RankGeometry],
    tables: Mapping[str, str],
    integrity: Integrity,
) -> int:
    """The most bytes of a message about a prompt of `num_tokens` tokens. `tables`: names by group; groups whose name is
    the same have the same block table.

    Pieces that the end of a prefill chunk cuts are not counted. A message that is too large after all fails its request
    by name.
    """
    found: dict[str, int] = {}
    others = _OTHER
    for group, rule in rules.items():
        geometry = geometries[group].geometry
        count = rule.num_pages(num_tokens, geometry.page_size)
        used = min(count, geometry.num_pages)
        size = used * _PAGE_ID + (count - used) * _NULL_PAGE
        found[tables[group]] = max(found.get(tables[group], 0), size)
        others += 4 * len(group) + _GROUP
        if integrity != "off":
            pieces = -(-len(rule.wanted(num_tokens, 0)) // PIECE_TOKENS) + 1
            due = pieces if integrity == "full" else -(-pieces // SAMPLED_SHARE) + 1
            hashes = DIGEST_BYTES * len(cells_of(geometry))
            others += due * (_PIECE + hashes + (hashes > _SHORT))
    return sum(found.values()) + others


def check_messages(
    max_tokens: int,
    rules: Mapping[str, Rules],
    geometries: Mapping[str, RankGeometry],
    tables: Mapping[str, str],
    integrity: Integrity,
) -> None:
    """Raise `ConfigError` if the messages about a prompt of `max_tokens` tokens, or of as many as the pages hold, would
    be too large. Parameters as of `message_bytes`."""
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
