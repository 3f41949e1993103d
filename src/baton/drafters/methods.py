"""The drafting methods and their classes.

Apart from `registry`, so that settings can be checked before PyTorch is imported.
"""

from __future__ import annotations

DRAFTERS = {
    "assistant": "baton.drafters.assistant:Assistant",
    "eagle": "baton.drafters.eagle:Eagle",
    "eagle3": "baton.drafters.eagle3:Eagle3",
    "dflash": "baton.drafters.dflash:DFlash",
    "dspark": "baton.drafters.dspark:DSpark",
    "draft_model": "baton.drafters.draft_model:DraftModel",
    "mtp": "baton.drafters.mtp:Mtp",
    "ngram": "baton.drafters.ngram:NGram",
}
# Methods without weights, or with the target's.
WITHOUT_MODEL = ("ngram", "mtp")
