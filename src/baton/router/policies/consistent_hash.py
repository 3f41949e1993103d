"""The same engine for the same conversation (rendezvous hashing, Thaler and Ravishankar, 1998).

Loads are bounded (Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, 2016): a popular key
spills over to its next engine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from baton.router.policies.base import EngineNeeds, Policy
from baton.router.pooled_engine import PooledEngine

# An engine may have this many times the mean number of legs.
_BOUND = 1.25
# A request without a session is keyed by its first tokens, such as a shared system prompt.
_KEY_BLOCKS = 8


class ConsistentHash(Policy):
    name = "consistent_hash"

    def _pick(self, needs: EngineNeeds, among: Sequence[PooledEngine]) -> PooledEngine:
        key = needs.session.encode() if needs.session else _prefix_key(needs)
        most = math.ceil(_BOUND * (1 + sum(engine.all_inflight for engine in among)) / len(among))
        ranked = sorted(among, key=lambda e: hashlib.blake2b(key + b"\0" + e.url.encode()).digest())
        return next((engine for engine in ranked if engine.all_inflight < most), ranked[0])


def _prefix_key(needs: EngineNeeds) -> bytes:
    chain = needs.prompt.chain()[:_KEY_BLOCKS]
    return chain[-1] if chain else repr(needs.prompt.tokens).encode()
