"""Requests of every sort at once, with clients that leave: grammars, sampling, prefix hits, stops. Drafts, prefix hits,
preemption and a handoff change no token, and what clients left is free again."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.engine.config import SpeculativeConfig
from baton.sampling_params import SamplingParams, StructuredOutputsParams
from benchmarks.parity.models import DRAFTERS, TARGETS
from testkit.engines import Mode, Stepped, Stream, pair, random_prompt, request, stepped

pytestmark = pytest.mark.usefixtures("one_thread")

GRAMMARS = [
    StructuredOutputsParams(regex=r"[a-z]{3,9} (yes|no), [0-9]{2}"),
    StructuredOutputsParams(choice=("red", "green", "light blue")),
    StructuredOutputsParams(grammar='root ::= ("(" root ")" | [a-f]) root?'),
    StructuredOutputsParams(json=json.dumps({"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 3})),
]
MODES: tuple[Mode, Mode] = ("push", "pull")
Asked = dict[str, tuple[list[int], SamplingParams]]


def asked_at_random(random: Random, count: int) -> Asked:
    """Requests by name. Prompts begin alike, and end at any token of a page, a window or an entry."""
    held = [random_prompt(60, seed=random.randrange(1000)) for _ in range(2)]
    found = {}
    for number in range(count):
        prompt = random.choice(held)[: random.randint(0, 60)] + random_prompt(random.randint(1, 9), number)
        found[f"{number}"] = prompt, params_at_random(random)
    return found


def params_at_random(random: Random) -> SamplingParams:
    choices: list[dict[str, Any]] = [
        {},
        {"top_k": random.randint(1, 9)},
        {"top_p": random.uniform(0.3, 1.0), "min_p": random.choice([0.0, 0.02])},
        {"presence_penalty": 0.7, "frequency_penalty": -0.3, "repetition_penalty": 1.3},
        {"logit_bias": {random.randrange(256): random.choice([-100.0, 3.0]) for _ in range(5)}},
        {"allowed_token_ids": tuple(random.sample(range(258), 7))},
        {"stop_token_ids": tuple(random.sample(range(256), 40)), "min_tokens": random.randint(0, 1)},
        {"structured_outputs": random.choice(GRAMMARS)},
        {"structured_outputs": random.choice(GRAMMARS), "top_p": 0.9, "repetition_penalty": 1.2},
    ]
    chosen = random.choice(choices)
    return SamplingParams(
        max_tokens=random.choice([1, 2, 5, 16, 24]),
        temperature=random.choice([0.0, 0.0, 0.7, 3.0]),
        seed=random.randrange(1 << 30),
        logprobs=random.choice([None, None, 0, 2]),
        ignore_eos="structured_outputs" not in chosen and random.random() < 0.3,
        **chosen,
    )


class Clients:
    """Some of them hang up after so many of their tokens."""

    def __init__(self, random: Random, asked: Asked) -> None:
        self._leaving = {name: random.randint(0, 6) for name in asked if random.random() < 0.25} | {"0": 0}

    def leave(self, streams: dict[str, Stream], *engines: Stepped) -> None:
        for name, after in list(self._leaving.items()):
            if name in streams and len(streams[name].token_ids) >= after:
                del self._leaving[name]
                for engine in engines:
                    engine.core.abort(name)


def check(whole: dict[str, Stream], streams: dict[str, Stream]) -> None:
    for name, stream in streams.items():
        if stream.finish_reason == "abort":
            assert stream.token_ids == whole[name].token_ids[: len(stream.token_ids)], name
        else:
            assert stream.result == whole[name].result, name
    assert streams["0"].finish_reason == "abort"


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    method = "assistant" if name == "gemma4_text" else "mtp"
    model, make = TARGETS[name](folder / "target", 1), DRAFTERS[method].make
    assert make is not None
    spec = {"num_speculative_tokens": 3, **make(folder / "drafter", model, 2)}
    small = {"kv_cache_memory": 8 << 20, "block_size": "4", "max_num_batched_tokens": 23}
    return {"model": str(model), "speculative_config": SpeculativeConfig.parse(spec), "max_model_len": 128, **small}


def alone(settings: dict[str, Any], asked: Asked) -> dict[str, Stream]:
    """The streams of an engine without drafts and prefix hits."""
    plain = {"speculative_config": None, "enable_prefix_caching": False, "max_num_batched_tokens": 512}
    with stepped(**{**settings, **plain}) as one:
        streams = {name: one.add(request(name, *parts)) for name, parts in asked.items()}
        while not all(stream.ended for stream in streams.values()):
            one.step()
    assert all(stream.error is None for stream in streams.values())
    return streams


@pytest.mark.parametrize("name", ["deepseek_v4", "qwen3_5_text"])
def test_handed_over_they_change_no_token(name: str, tmp_path: Path) -> None:
    play(settings_of(name, tmp_path), 4, 14, tmp_path)


def play(settings: dict[str, Any], seed: int, count: int, folder: Path) -> None:
    random = Random(seed)
    asked = asked_at_random(random, count)
    whole, waiting, clients, streams = alone(settings, asked), list(asked), Clients(random, asked), dict[str, Stream]()
    with pair(folder, {"block_size": "7"}, **settings, integrity="full") as two:
        scheduler, preempted_at = two.decode.core.scheduler, {name: random.randint(1, 4) for name in asked}

        def over() -> bool:
            if waiting and random.random() < 0.3:
                name = waiting.pop()
                _, streams[name] = two.legs(name, *asked[name], random.choice(MODES))
            for request in list(scheduler.running):
                if request.num_output >= preempted_at.get(request.request_id, 99):
                    del preempted_at[request.request_id]
                    scheduler.preempt(request)
            clients.leave(streams, two.prefill, two.decode)
            return not waiting and all(stream.ended for stream in streams.values())

        two.step_until(over, limit_s=300.0)
        two.settle()
        check(whole, streams)
        metrics = two.decode.core.metrics
        assert not metrics.recoveries
        assert scheduler.num_preemptions > 0
        assert sum(metrics.accepted_per_pos) > 0
        assert metrics.num_handoffs["committed"] > count // 2
