"""Whether two engines may hand over to each other, by the facts that each tells of itself."""

from __future__ import annotations

from collections.abc import Mapping

_DRAFT_FACTS = ("drafter.", "group.draft")
_DRAFT_KV, _NUM_DRAFTS, _VERIFIER = "drafter.kv", "drafter.num_speculative_tokens", "drafter.verifier"


def differing_facts(
    here: Mapping[str, object], peer: Mapping[str, object]
) -> tuple[dict[str, tuple[object, object]], bool]:
    """The facts of two engines that forbid a handoff between them, with both values, and whether drafters' KV moves.

    Every fact must be equal, and that of an engine that lacks it is "absent". What is said of drafters may differ where
    one engine's `draft_kv` allows it and the other's does not require otherwise; an engine without a drafter has none.
    Drafts that one verifier made are then of use to the same verifier alone.
    """
    pairs = {name: (here.get(name, "absent"), peer.get(name, "absent")) for name in sorted({*here, *peer})}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    policies = {side[_DRAFT_KV] for side in (here, peer) if _DRAFT_KV in side}
    if policies <= {"require"}:
        return differing, True
    if "require" in policies:
        if "drop" not in policies:
            del differing[_DRAFT_KV]
        return differing, True
    for allowed in (_DRAFT_KV, _NUM_DRAFTS):
        differing.pop(allowed, None)
    drafters = {name for name in differing if name.startswith(_DRAFT_FACTS)}
    moves = not drafters and "drop" not in policies
    if _VERIFIER in here and _VERIFIER in peer:
        drafters.discard(_VERIFIER)
    return {name: pair for name, pair in differing.items() if name not in drafters}, moves
