"""The official `openai` client against `baton up`, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from testkit.processes.running import END_LIMIT_S, Running, running_up

MODEL_PATH = "models/baton-demo-llama"
MODEL = "baton-demo-llama"
PROMPT = "The with statement is used to"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_up(MODEL_PATH, tmp_path_factory.mktemp("up") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(up: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60.0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_completion_streams_what_it_returns_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0)
    assert whole.object == "text_completion"
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.choices[0].text
    assert whole.usage is not None
    assert 1 <= whole.usage.completion_tokens <= 16
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    with stream:
        *events, last = list(stream)
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in events if event.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(event.usage is None for event in events)


def test_chat_streams_what_it_returns_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=16, temperature=0)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    with stream:
        *events, last = list(stream)
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_logprobs(client: openai.OpenAI) -> None:
    completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert completion.usage is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == completion.usage.completion_tokens
    # Greedy: the chosen token is the most likely one, also for the first token, which the prefill engine sampled.
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3
        assert chosen == max(top.values()) <= 0.0

    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob


def test_two_choices(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str]:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=1, n=2, seed=seed)
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.text for choice in answer.choices]

    first = ask(seed=4)
    assert first[0] != first[1]
    assert ask(seed=4) == first


def test_stop_string(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 :][:4]
    stopped = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=stop)
    assert stopped.choices[0].text == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_refusals_have_openai_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model") as unknown:
        client.completions.create(model="no-such-model", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="max_tokens") as negative:
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=-1)
    assert negative.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="5000 tokens") as long:
        client.completions.create(model=MODEL, prompt=[5] * 5000, max_tokens=1)
    assert long.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=-1, stream=True)
    assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2).choices


def descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found, fresh = set[int](), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def shared_memory_of(pids: set[int]) -> set[str]:
    """Names of Baton's shared memory whose owner is one of `pids`; the owner is in the name."""
    names = (path.name for path in Path("/dev/shm").glob("baton-*"))
    return {name for name in names if int(name.split("-")[1]) in pids}


@pytest.mark.slow
@pytest.mark.parametrize("while_serving", [False, True], ids=["idle", "while serving"])
def test_interrupt_ends_everything(tmp_path: Path, while_serving: bool) -> None:
    path = tmp_path / "log"
    with running_up(MODEL_PATH, path) as up:
        pids = descendants(up.process.pid)
        assert len(pids) == 2
        assert shared_memory_of(pids)
        with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
            if while_serving:
                stream = client.completions.create(
                    model=MODEL, prompt=PROMPT, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
                )
                assert next(stream).choices
            up.process.send_signal(signal.SIGINT)
            status = up.process.wait(END_LIMIT_S)
            if while_serving:
                stream.close()
    assert status in (0, 130), path.read_text()
    assert "Traceback" not in path.read_text()
    deadline = time.monotonic() + END_LIMIT_S
    while alive := [pid for pid in pids if pid in descendants(os.getpid()) or Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {alive} are left"
        time.sleep(0.05)
    assert not shared_memory_of(pids)
