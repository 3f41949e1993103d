"""The official client in conversations with each deployment."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import openai
import pytest

from benchmarks import smollm2
from tests.clients.conversations import ALL, Conversations
from tests.clients.deployments import before_vllm, embedded

DEPLOYMENTS = {"embedded engines": embedded, "vLLM servers": before_vllm}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        with DEPLOYMENTS[request.param](tmp_path_factory.mktemp("clients")) as url:
            yield url
    except smollm2.NotAvailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("conversation", ALL, ids=lambda each: each.__name__)
def test_conversation(url: str, conversation: Callable[[Conversations], object]) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        conversation(Conversations(client))
