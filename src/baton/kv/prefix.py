"""Prefix-cache identity of pages: a hash chain over tokens, per group.

A drafter page's KV depends on `reach` later tokens too (EAGLE: 1, because entry i is computed from token i + 1). Its
identity includes them: a chain over the page's own tokens would return another prompt's drafter KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ROOT = b"baton.prefix"


class Chain(list[bytes]):
    """Known digests of first pages. Requests share pages only if their `root` is equal."""

    __slots__ = ("root",)

    def __init__(self, root: bytes = ROOT) -> None:
        super().__init__()
        self.root = root


def salted_root(salt: str | None) -> bytes:
    """Requests without this `cache_salt` can neither find nor use the pages of requests with it."""
    return ROOT if salt is None else hashlib.blake2b(salt.encode(), key=ROOT, digest_size=16).digest()


def page_identity(tokens: Sequence[int], page: int, page_size: int, reach: int) -> tuple[int, ...] | None:
    """The tokens that page number `page` of a request depends on beyond its parent. None if some are still unknown."""
    start = page * page_size
    stop = start + page_size + reach
    return tuple(tokens[start:stop]) if stop <= len(tokens) else None


def chain_hash(parent: bytes, identity: Sequence[int]) -> bytes:
    """16-byte BLAKE2b of the parent's digest and this page's identity tokens (as int64)."""
    return hashlib.blake2b(parent + array("q", identity).tobytes(), digest_size=16).digest()
