"""Compares engines' facts: may they hand over to each other, and may one continue the other's stream?"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import msgspec

_DRAFT_FACTS = ("drafter.", "group.draft")
_DRAFT_KV, _NUM_DRAFTS, _VERIFIER = "drafter.kv", "drafter.num_speculative_tokens", "drafter.verifier"
_METHOD, _AUTO = "drafter.method", "auto"
# The fact of engines that do not promise equal bits.
PROCESSOR = "numerics.processor"


def unequal_facts(here: Mapping[str, object], peer: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Both values by name; a missing one is "absent"."""
    pairs = {name: (here.get(name, "absent"), peer.get(name, "absent")) for name in sorted({*here, *peer})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def facts_of(fingerprint: str) -> dict[str, object]:
    """A fingerprint is a JSON object of facts. Any other text counts as one fact."""
    try:
        return msgspec.json.decode(fingerprint, type=dict[str, object])
    except msgspec.DecodeError:
        return {"fingerprint": fingerprint}


def token_facts(fingerprint: str) -> dict[str, object]:
    """The facts that decide tokens. The drafter's are included unless the `coupled` verifier makes the output
    independent of drafts; the rejection samplers of Baton and vLLM do not."""
    facts = facts_of(fingerprint)
    facts.pop(PROCESSOR, None)
    if facts.get(_METHOD, "none") != "none" and facts.get(_VERIFIER) != "coupled":
        return facts
    return {name: value for name, value in facts.items() if not name.startswith(_DRAFT_FACTS)}


def rounding_difference(here: Mapping[str, object], peer: Mapping[str, object]) -> str | None:
    """None if processors are equal."""
    own, other = here.get(PROCESSOR), peer.get(PROCESSOR)
    if own is None or other is None or own == other:
        return None
    return (
        f"{own!r} and {other!r} may round differently: where two tokens are nearly equal, an answer may differ from "
        "that of one engine. With --batch-invariant engines compare bits, and refuse each other if they differ"
    )


@functools.lru_cache(maxsize=256)
def token_identity(fingerprint: str) -> str:
    """A digest of `token_facts`, 32 hex digits. Engines with equal identities give a request the same tokens."""
    text = msgspec.json.encode(token_facts(fingerprint), order="deterministic")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def differing_facts(
    here: Mapping[str, object], peer: Mapping[str, object]
) -> tuple[dict[str, tuple[object, object]], bool]:
    """The facts that forbid a handoff, and whether drafters' KV moves.

    Drafters may differ if one engine's `draft_kv` allows it and the other's, if any, does not require equality.
    Verifiers must still be equal.
    """
    differing = unequal_facts(here, peer)
    differing.pop(PROCESSOR, None)
    if _AUTO in (here.get(_NUM_DRAFTS), peer.get(_NUM_DRAFTS)):
        # An engine that chooses k itself takes any number of drafts.
        differing.pop(_NUM_DRAFTS, None)
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
