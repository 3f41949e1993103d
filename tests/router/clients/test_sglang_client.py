"""A leg's request to an SGLang server, and its events as chunks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web

from baton.errors import EngineUnavailableError, HandoffError, ProtocolError, RequestError
from baton.router.clients.engine_client import new_session
from baton.router.clients.sglang_client import SglangClient, _Event, chosen, generate_body, to_token_chunk
from baton.router.clients.vllm_api import completion_body
from baton.router.connectors import create_connector
from baton.router.connectors.base import ConnectorConfig
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams, seed_word
from baton.wire import GenerateRequest, PromptIds, Role, SglangIdentity
from testkit.servers.fake_serving import served


def request(**params: object) -> GenerateRequest:
    """A prompt of three tokens, and one output token that the client has."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, **params)  # type: ignore[arg-type]
    return GenerateRequest(request_id="r", prompt_token_ids=[1, 2, 3, 4], num_prompt_tokens=3, sampling_params=sampling)


def event(tokens: list[int], count: int, finish: dict[str, object] | None = None, **more: object) -> _Event:
    meta = {"completion_tokens": count, "finish_reason": finish, **more}
    return msgspec.convert({"output_ids": tokens, "meta_info": meta}, _Event)


@pytest.mark.parametrize("more", [{}, {"output_top_logprobs": [[(-1.0, -1, None)]]}])
def test_what_is_no_token_is_no_event(more: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int` >= 0"):
        event([1] if more else [-1], 1, **more)


@pytest.mark.parametrize("tokens", [[7, 8, 9], [8, 9]])
def test_events_may_repeat_all_tokens_or_have_the_new_ones_alone(tokens: Any) -> None:
    chunk = to_token_chunk(request(), event(tokens, 3), 1)
    assert (chunk.token_ids, chunk.position, chunk.finish_reason) == ([8, 9], 2, None)


def test_the_ends_of_a_leg() -> None:
    ended = {"type": "stop", "matched": 9}
    assert to_token_chunk(request(), event([9], 1, ended), 0).finish_reason == "stop"
    assert to_token_chunk(request(), event([9], 1, ended), 0).stop_reason is None
    assert to_token_chunk(request(stop_token_ids=(9,)), event([9], 1, ended), 0).stop_reason == 9
    assert to_token_chunk(request(), event([9], 1, {"type": "length", "length": 1}), 0).finish_reason == "length"


def test_a_failed_handoff_is_an_error_and_never_an_answer() -> None:
    """Field class G: SGLang ends it with finish reason "abort" in a response with status 200."""
    with pytest.raises(HandoffError, match="peer_lost"):
        to_token_chunk(request(), event([9], 1, {"type": "abort", "message": "peer_lost: P is silent"}), 0)
    with pytest.raises(HandoffError, match="too long"):
        to_token_chunk(request(), msgspec.convert({"error": {"message": "too long"}}, _Event), 0)
    wrapped = (
        "Decode transfer failed for request rank=0 rid=a_b: with exception KVTransferError(7): peer_lost: P is silent"
    )
    with pytest.raises(HandoffError) as failed:
        to_token_chunk(request(), event([9], 1, {"type": "abort", "message": wrapped}), 0)
    assert failed.value.reason == "peer_lost"
    with pytest.raises(HandoffError) as failed:
        to_token_chunk(request(), event([9], 1, {"type": "abort", "message": "out_of: memory"}), 0)
    assert failed.value.reason == "engine_error"
    with pytest.raises(ProtocolError, match="does not follow"):
        to_token_chunk(request(), event([9], 5), 1)


@pytest.mark.parametrize(
    ("message", "num_sent", "kind"),
    [
        ("top_k must be -1 or above", 0, RequestError),
        ("top_k must be -1 or above", 1, HandoffError),
        ("peer_lost: P is silent", 0, HandoffError),
    ],
)
def test_a_refusal_is_the_clients_error(message: str, num_sent: int, kind: type[Exception]) -> None:
    """SGLang sends it in a stream with status 200, and calls errors of its own so too."""
    said = msgspec.convert({"error": {"message": message, "code": 400}}, _Event)
    with pytest.raises(kind, match=message):
        to_token_chunk(request(), said, num_sent)


def test_logprobs_are_those_of_the_new_tokens() -> None:
    own = [[-0.1, 7, None], [-0.2, 8, None]]
    top = [[[-0.1, 7, None]], [[-0.2, 8, None], [-1.5, 3, None]]]
    more = {"output_token_logprobs": own, "output_top_logprobs": top}
    chunk = to_token_chunk(request(logprobs=2), event([7, 8], 2, None, **more), 1)
    assert chunk.logprobs is not None
    (only,) = chunk.logprobs
    assert (only.logprob, only.top) == (-0.2, [(8, -0.2), (3, -1.5)])


def test_limits_count_from_the_clients_prompt() -> None:
    body = generate_body(request(min_tokens=5, seed=3, logit_bias={4: 1.5}), 7)
    sampling = body["sampling_params"]
    assert body["input_ids"] == [1, 2, 3, 4]
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"]) == (7, 4)
    assert (sampling["sampling_seed"], sampling["logit_bias"], sampling["top_k"]) == (3, {"4": 1.5}, -1)


@pytest.mark.parametrize(("given", "sent"), [(-5, -5), (2**40, 2**40), (-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1)])
def test_a_seed_is_sglangs(given: int, sent: int) -> None:
    body = generate_body(request(seed=seed_word(given)), 7)
    assert body["sampling_params"]["sampling_seed"] == sent


@pytest.mark.parametrize("name", ["input_ids", "prompt"])
def test_legs_share_the_json_of_a_prompt(name: str) -> None:
    prompt = PromptIds([1, 2])
    asked = msgspec.structs.replace(request(), prompt_token_ids=prompt, num_prompt_tokens=None)
    for _ in range(2):
        body = generate_body(asked, 7) if name == "input_ids" else completion_body(asked, "m", 0, None, False, True)
        assert msgspec.json.decode(msgspec.json.encode(body))[name] == [1, 2]
        prompt.clear()


def test_parameters_that_sglang_lacks_are_refused_by_name() -> None:
    connector = create_connector("sglang", ConnectorConfig(b"k" * 32))
    for name, value in {"allowed_token_ids": (1,), "bad_words": ("a",), "prompt_logprobs": 1}.items():
        with pytest.raises(RequestError, match=name):
            connector.check(SamplingParams(**{name: value}))  # type: ignore[arg-type]
    connector.check(SamplingParams())
    assert connector.can_resume(SamplingParams(temperature=0.0))
    assert not connector.can_resume(SamplingParams(temperature=0.0, frequency_penalty=1.0))


def test_no_server_computes_a_request_alone() -> None:
    from types import SimpleNamespace

    connector = create_connector("sglang", ConnectorConfig(b"k" * 32))
    with pytest.raises(EngineUnavailableError, match="one leg"):
        connector.alone(request(), SimpleNamespace(url="http://d"))  # type: ignore[arg-type]


def identity(rank: int | None) -> SglangIdentity:
    name = "P" if rank is None else f"P_dp{rank}"
    return SglangIdentity(name, "i", [], "{}", 99, [], 0, data_parallel_rank=rank, role="prefill", max_model_len=99)


def test_each_data_parallel_rank_is_an_engine_that_a_url_names() -> None:
    ranks = [identity(1), identity(0)]  # in the order in which they answered
    assert chosen(ranks, "http://p#dp_rank=0", 0).engine_id == "P_dp0"
    assert chosen([identity(None)], "http://p", None).engine_id == "P"
    with pytest.raises(RequestError, match="name each"):
        chosen(ranks, "http://p", None)
    with pytest.raises(RequestError, match="no such rank"):
        chosen(ranks, "http://p", 2)
    with pytest.raises(ProtocolError, match="does not run"):
        chosen([], "http://p", None)


async def test_a_leg_names_its_data_parallel_rank_whatever_its_room() -> None:
    """Field class J: a rank taken from the room, or always rank 0, computes with another's KV."""
    bodies: list[dict[str, Any]] = []

    async def generate(http: web.Request) -> web.Response:
        bodies.append(await http.json())
        ended = {"output_ids": [7], "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "length"}}}
        return web.Response(text=f"data: {msgspec.json.encode(ended).decode()}\n\ndata: [DONE]\n\n")

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with served(app) as url, new_session() as session:
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            client = SglangClient(session, f"{url}#dp_rank=1", RouterTimers(), role)
            chunks = [chunk.token_ids async for chunk in client.leg(request(), {"bootstrap_room": 4})]
            assert chunks == [[7]]
    assert [(body["routed_dp_rank"], body["bootstrap_room"]) for body in bodies] == [(1, 4), (1, 4)]
