"""The copies of one attempt: outstanding, retried, and bytes moved."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.handoff.protocol.events import Action, CancelCopies, CopyEnded, Count, StartCopy
from baton.kv.interval import ALL_LAYERS, Interval


@dataclass(slots=True)
class CopyLedger:
    """At most `max_retries` failed copies are issued again. `num_hidden`: bytes of copies that ended before the prefill
    did.
    """

    max_retries: int = 0
    next_id: int = 0
    retries: int = 0
    outstanding: dict[int, StartCopy] = field(default_factory=dict)
    num_bytes: int = 0
    num_runs: int = 0
    num_hidden: int = 0

    def start(
        self,
        group: str,
        tokens: Interval,
        source_pages: list[int],
        dest_pages: list[int],
        layers: Interval = ALL_LAYERS,
    ) -> StartCopy:
        copy = StartCopy(self.next_id, group, tokens, source_pages, dest_pages, layers)
        self.next_id += 1
        self.outstanding[copy.copy_id] = copy
        return copy

    def end(self, event: CopyEnded) -> StartCopy | None:
        """None if its end was recorded before."""
        copy = self.outstanding.pop(event.copy_id, None)
        if copy is not None:
            self.num_bytes += event.num_bytes
            self.num_runs += event.num_runs
        return copy

    @property
    def may_retry(self) -> bool:
        return self.retries < self.max_retries

    def retry(self, failed: StartCopy) -> list[Action]:
        """Requires `may_retry`."""
        self.retries += 1
        again = self.start(failed.group, failed.tokens, failed.source_pages, failed.dest_pages, failed.layers)
        return [Count("retries"), again]

    def touches(self, group: str, tokens: Interval) -> bool:
        """Whether an outstanding copy moves any of these tokens, in any layer."""
        return any(
            copy.group == group and copy.tokens.start < tokens.stop and tokens.start < copy.tokens.stop
            for copy in self.outstanding.values()
        )

    def cancel(self) -> list[Action]:
        return [CancelCopies(tuple(sorted(self.outstanding)))] if self.outstanding else []
