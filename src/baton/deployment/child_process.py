"""A child process of a deployment, as its parent sees it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.deployment.child import read_rest
from baton.deployment.child_log import ChildLog
from baton.errors import ConfigError


@dataclass(slots=True)
class Child:
    """`pending`: the incomplete last line of `pipe`. `url` is set once it serves; `kv`: its KV capacity as text;
    `refusal`: the setting that it refused; `signalled`: it ends because of a signal."""

    name: str
    arguments: list[str]
    process: subprocess.Popen[bytes]
    pipe: int
    log: ChildLog
    pending: bytes = b""
    url: str | None = None
    urls: tuple[str, ...] = ()
    kv: str = ""
    signalled: bool = False
    refusal: ConfigError | None = None

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0] or self.name

    def note(self, report: Mapping[str, Any]) -> None:
        self.urls = tuple(report.get("urls", self.urls))
        self.url, self.kv = report.get("ready", self.url), report.get("kv", self.kv)
        self.signalled |= "signalled" in report
        if "refused" in report:
            self.refusal = ConfigError(report["refused"], f"{report['why']} ({self.name} did not start)")

    def read_last_reports(self) -> None:
        """For a child that has ended: see `read_rest`."""
        for report in read_rest(self.pipe, self.pending) if self.pipe >= 0 else ():
            self.note(report)
