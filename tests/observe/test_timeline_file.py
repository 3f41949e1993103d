"""The timeline of `--trace` on a disk that is full."""

from __future__ import annotations

import pytest

from baton.observe.tracing.perfetto import PerfettoFile
from baton.observe.tracing.span import Span, SpanEvent


@pytest.mark.parametrize("num_spans", [0, 1, 3])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_told_once_and_raises_nothing(num_spans: int, caplog: pytest.LogCaptureFixture) -> None:
    file = PerfettoFile("/dev/full")
    for _ in range(num_spans):
        file.export(Span("request", 1, 2, events=[SpanEvent("first token", 3)]))
    file.close()
    (line,) = caplog.messages
    assert line.endswith("No space left on device")
