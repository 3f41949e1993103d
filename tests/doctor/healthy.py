"""A check-up without findings, and changes of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec

from baton.doctor.checkup import BOTH, Checkup, Host, Reading, RouterEntry, RouterFacts, Server, Trial
from baton.wire import EngineIdentity, LegRole

P, D, ROUTER = "http://127.0.0.1:8101", "http://127.0.0.1:8102", "http://127.0.0.1:8000"
FACTS = {
    "model.weights": "a",
    "model.dtype": "bfloat16",
    "output.sampling_defaults": "",
    "drafter.method": "eagle3",
    "drafter.num_speculative_tokens": "3",
    "drafter.verifier": "coupled",
    "drafter.kv": "require",
    "group.target.full": "('full', [('k', 'bfloat16', 4, 32)], None, (0,))",
}
SETTINGS = {
    "version": "0.1.0",
    "served_model_name": "demo",
    "max_model_len": "4096",
    "seed": "None",
    "cache_dtype": "bfloat16",
    "kv_transport": "shm",
}


def identity(name: str, port: int, **facts: str) -> EngineIdentity:
    return EngineIdentity(
        engine_id=name,
        incarnation=f"{name}-1",
        control_addresses=[f"curve://{name}@127.0.0.1:{port}"],
        fingerprint=json.dumps({**FACTS, **facts}),
        vocab_size=258,
        eos_token_ids=[257],
        num_speculative_tokens=3,
        clock=100.0,
    )


def engine(url: str, role: LegRole, **changes: Any) -> Server:
    server = Server(
        url=url,
        kind="baton",
        version="0.1.0",
        model="demo",
        max_model_len=4096,
        identity=identity(f"{role}-0", int(url[-4:]) + 1000),
        roles=(role,),
        connector="Baton",
        max_num_seqs=64,
        settings=SETTINGS,
        clocks=(Reading(100.0, 100.0, 0.001), Reading(101.0, 101.0, 0.001)),
    )
    return dataclasses.replace(server, **changes)


def vllm(url: str, role: LegRole, **settings: str) -> Server:
    """A vLLM server with NixlConnector, which tells no identity."""
    told = {"version": "0.32.0", "block_size": "16", "cache_dtype": "auto", "nixl_backends": "['UCX']"}
    return Server(
        url=url,
        kind="vllm",
        version="0.32.0",
        model="demo",
        max_model_len=4096,
        roles=(role,),
        connector="NixlConnector",
        settings={**told, **settings},
    )


def sglang(url: str, role: LegRole, **settings: str) -> Server:
    told = {"version": "0.5.23", "page_size": "64", "speculative_algorithm": "EAGLE3"}
    return Server(url=url, kind="sglang", roles=(role,), connector="nixl", settings={**told, **settings})


def checkup(**changes: Any) -> Checkup:
    """`p`, `d`, `router`, `trial`, `host`: replace fields of that part; any other name is a field of the check-up."""
    parts: dict[str, Any] = {
        "p": engine(P, "prefill"),
        "d": engine(D, "decode"),
        "router": RouterFacts(
            url=ROUTER,
            version="0.1.0",
            ready=True,
            engines=(
                RouterEntry(url=P, role="prefill", engine_id="prefill-0"),
                RouterEntry(url=D, role="decode", engine_id="decode-0"),
            ),
        ),
        "host": Host(num_files=4096, shm_bytes=2**30, shm_free=2**29),
        "trial": Trial(
            num_prompt_tokens=512,
            num_tokens=8,
            ttft_s=0.02,
            total_s=0.1,
            handoffs={"started": 1, "completed": 1},
            decisions={"handed_off": 1},
            num_bytes=1000,
            num_runs=5,
        ),
    }
    for name in parts.keys() & changes.keys():
        change = changes.pop(name)
        parts[name] = dataclasses.replace(parts[name], **change) if isinstance(change, dict) else change
    servers = changes.pop("servers", (parts["p"], parts["d"]))
    return Checkup(
        **{"servers": servers, "router": parts["router"], "host": parts["host"], "trial": parts["trial"], **changes}
    )


def facts(**changes: str) -> dict[str, Any]:
    """A change of D's facts, with `_` for the dot of a name."""
    named = {name.replace("_", ".", 1): value for name, value in changes.items()}
    return {"identity": identity("decode-0", 9102, **named)}


def settings(**changes: str) -> dict[str, Any]:
    return {"settings": {**SETTINGS, **changes}}


def addresses(*control: str) -> dict[str, Any]:
    return {"identity": msgspec.structs.replace(identity("decode-0", 9102), control_addresses=list(control))}


__all__ = ["BOTH", "ROUTER", "D", "P", "addresses", "checkup", "engine", "facts", "settings", "sglang", "vllm"]
