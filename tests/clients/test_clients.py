"""Conversations of the official client with each deployment, and replayed requests of other clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import openai
import pytest

from benchmarks import smollm2
from testkit.clients.deployments import before_vllm, embedded
from tests.clients.conversations import ALL, Conversations
from tests.clients.replay import CLIENTS, replay

FRAMEWORKS = {"langchain", "litellm", "llm", "openai_agents"}
DEPLOYMENTS = {"embedded engines": embedded, "vLLM servers": before_vllm}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        with DEPLOYMENTS[request.param](tmp_path_factory.mktemp("clients")) as url:
            yield url
    except smollm2.NotAvailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("conversation", ALL, ids=lambda each: each.__name__)
def test_a_stock_client_holds_a_conversation(url: str, conversation: Callable[[Conversations], object]) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        conversation(Conversations(client))


def test_the_recordings_have_what_they_are_for() -> None:
    """Each client streams; frameworks follow a schema, and continue after a call's result; guidellm counts
    each token.
    """
    assert set(CLIENTS) == {*FRAMEWORKS, "anthropic", "aider", "guidellm", "aiperf"}
    texts = {client: " ".join(request["body"] for request in requests) for client, requests in CLIENTS.items()}
    for client, requests in CLIENTS.items():
        bodies = [json.loads(request["body"]) for request in requests]
        assert any(body.get("stream") for body in bodies)
        if client in FRAMEWORKS:
            assert any((body.get("response_format") or {}).get("type") == "json_schema" for body in bodies)
            assert any(message["role"] == "tool" for body in bodies for message in body.get("messages", []))
    assert "tool_result" in texts["anthropic"]
    assert "function_call_output" in texts["openai_agents"]
    assert "continuous_usage_stats" in texts["guidellm"]


@pytest.mark.parametrize("client", CLIENTS)
def test_answers_to_other_clients_are_what_was_asked_for(url: str, client: str) -> None:
    for request in CLIENTS[client]:
        # A framework's chats cost a second each, and those of openai-agents add nothing to the others'.
        if client != "openai_agents" or request["path"] == "/v1/responses":
            replay(url, **request)
