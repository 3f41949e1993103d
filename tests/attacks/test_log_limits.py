"""What strangers cause is logged, but fills no disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import pytest

from baton.errors import EngineUnavailableError, RequestError
from baton.kvevents import publisher
from baton.log_limit import LINES_PER_SECOND, LogLimit
from baton.openai.http.api_errors import to_api_error
from baton.openai.refused_fields import refuse_unserved


@pytest.mark.parametrize(
    "attack",
    [
        lambda: refuse_unserved({"ticket": msgspec.Raw(b'"x"')}),
        lambda: to_api_error(EngineUnavailableError("engine http://10.0.0.1:99 is gone")),
        lambda: to_api_error(ValueError("a fault that a client has found")),
    ],
    ids=["forbidden field", "address", "unexpected error"],
)
def test_strangers_cannot_fill_the_log(attack: Callable[[], object], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5 * LINES_PER_SECOND):
        with contextlib.suppress(RequestError):
            attack()
    assert 0 < len(caplog.records) <= 2 * LINES_PER_SECOND  # a second may end meanwhile


def test_malformed_requests_for_events_cannot_either() -> None:
    assert any(isinstance(one, LogLimit) for one in publisher.logger.filters)
