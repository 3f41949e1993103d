"""Requests that arrive at a scheduler without an engine."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest

_NUMBERS = itertools.count(1)


def arriving(scheduler: Scheduler, length: int, **fields: Any) -> Request:
    """Queue a request of `length` prompt tokens. No prompt begins as another. `fields`: of its `GenerateRequest`."""
    number = next(_NUMBERS)
    prompt = [100 * number + token for token in range(length)]
    wire = GenerateRequest(request_id=f"{number}", prompt_token_ids=prompt, sampling_params=SamplingParams(), **fields)
    sampler: Any = SimpleNamespace(advance=lambda tokens: None)
    request = Request(wire, sampler)
    request.arrival = number
    scheduler.enqueue(request)
    return request
