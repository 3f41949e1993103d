"""Reports written layers of a running forward. A message costs as much as copying a megabyte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.handoff.agent.leg_events import Agent
from baton.handoff.plan.tables import copy_tables
from baton.handoff.protocol.events import LayersWithdrawn, LayersWritten
from baton.handoff.protocol.messages import AttemptKey


@dataclass(slots=True)
class WrittenLayers:
    """`num_tokens`: of the prompt in the forward. `final`: per group, the end of the final tokens after it.
    `unreported`: bytes written in `groups` since the last report.
    """

    agent: Agent
    key: AttemptKey
    num_tokens: int
    pages: Mapping[str, list[int]]
    final: Mapping[str, int]
    unreported: int = 0
    groups: set[str] = field(default_factory=set)
    reported: bool = False

    def add(self, group: str, num_bytes: int) -> None:
        self.unreported += num_bytes
        self.groups.add(group)

    def report(self, stop: int) -> None:
        self.report_tokens({group: self.final[group] for group in sorted(self.groups)}, stop)
        self.unreported, self.groups = 0, set()

    def report_tokens(self, final: Mapping[str, int], stop: int) -> None:
        """In the layers below `stop`."""
        tables = copy_tables({group: self.pages[group] for group in final})
        self.agent.stream_layers(self.key, LayersWritten(self.num_tokens, tables, dict(final), stop))
        self.reported = True

    def withdraw(self) -> None:
        if self.reported:
            self.agent.stream_layers(self.key, LayersWithdrawn())
