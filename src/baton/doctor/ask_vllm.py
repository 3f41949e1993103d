"""Asks a vLLM server for its connector, from BatonConnector's identity or NIXL's metrics, and its settings, from
`/server_info` if it runs with VLLM_SERVER_DEV_MODE=1."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.samples import Sample

from baton.doctor.checkup import BOTH, Reading, Server
from baton.errors import BatonError, ProtocolError
from baton.openai.answers import Model, decode_answer, printable_line
from baton.openai.client import OpenAIClient
from baton.router.clients.vllm_api import render_bodies, rendered_defaults
from baton.wire import BATON_PARAM, EngineIdentity, LegParams, LegRole, VllmIdentity

_NIXL, _PER_POSITION = "vllm:nixl_", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_CACHE = "vllm:cache_config_info"
_KV_ROLES: Mapping[str, tuple[LegRole, ...]] = {"kv_producer": ("prefill",), "kv_consumer": ("decode",)}
_NOT_REPORTED = (
    "does not tell its connector, its role, NIXL back-ends and side channel: start it with VLLM_SERVER_DEV_MODE=1, "
    "where nobody else can reach it"
)


async def read_cache(client: OpenAIClient) -> Mapping[str, str]:
    try:
        return _cache_of(await client.samples())
    except BatonError:
        return {}


async def ask_vllm(client: OpenAIClient, model: Model) -> Server:
    """The server of `model`. Raises the errors of `OpenAIClient`."""
    version = await _json(client, "/version")
    info = await _json(client, "/server_info?config_format=json")
    try:
        samples = await client.samples()
    except BatonError:
        samples = []
    cache = _cache_of(samples)
    nixl = any(sample.name.startswith(_NIXL) for sample in samples)
    identity, reading = (None, None) if nixl else await ask_identity(client, model)
    transfer = _dict(_dict(info, "vllm_config"), "kv_transfer_config")
    named = transfer.get("kv_connector")
    connector = "BatonConnector" if identity is not None else str(named or "a NIXL connector") if nixl else None
    if identity is not None:
        roles = tuple(role for role in BOTH if role in identity.roles)
    else:
        roles = _KV_ROLES.get(str(transfer.get("kv_role")), BOTH)
    reported = None if version is None else str(version.get("version"))
    settings = {
        "served_model_name": model.id,
        "max_model_len": None if model.max_model_len is None else str(model.max_model_len),
        "cache_dtype": cache.get("cache_dtype"),
        "block_size": cache.get("block_size"),
        "version": reported,
        **_told_settings(info, transfer),
    }
    not_reported = [] if info is not None else [_NOT_REPORTED]
    if identity is None:
        # BatonConnector reports these in its identity.
        drafts = {sample.labels.get("position") for sample in samples if sample.name == _PER_POSITION}
        defaults = await _sampling_defaults(client, model)
        settings |= {
            "model.root": model.root,
            "num_speculative_tokens": str(len(drafts)),
            "sampling_defaults": defaults,
        }
        not_reported += [] if defaults is not None else ["does not tell its sampling defaults: --enable-scale-out does"]
    else:
        settings["num_speculative_tokens"] = str(identity.num_speculative_tokens)
        settings["kv_transport"] = identity.kv_transport or None
        if identity.tile:
            settings["block_size"] = "any" if identity.tile == 1 else f"{identity.tile}, copied whole"
    return Server(
        url=client.url,
        kind="vllm",
        version=None if reported is None else printable_line(reported),
        model=model.id,
        max_model_len=model.max_model_len,
        identity=identity or _side_channel(info, client.url, nixl),
        roles=roles,
        connector=connector,
        settings={name: printable_line(value) for name, value in settings.items() if value is not None},
        clocks=() if reading is None else (reading,),
        not_reported=tuple(not_reported),
        page_size=cache.get("block_size"),
    )


def _cache_of(samples: Sequence[Sample]) -> Mapping[str, str]:
    return next((sample.labels for sample in samples if sample.name == _CACHE), {})


async def ask_identity(client: OpenAIClient, model: Model) -> tuple[VllmIdentity | None, Reading | None]:
    """Ask by a greedy completion of one token, as routers do; other connectors ignore its parameters."""
    params = {BATON_PARAM: msgspec.to_builtins(LegParams(role="identify"))}
    body = {"model": model.id, "prompt": [0], "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
    began = time.monotonic()
    answered = (await client.complete(body)).kv_transfer_params or {}
    if BATON_PARAM not in answered:
        return None, None
    try:
        identity = msgspec.convert(answered[BATON_PARAM], VllmIdentity)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{client.url}: its BatonConnector's identity is malformed: {error}") from None
    return identity, Reading.of(began, identity.clock)


def _told_settings(info: Mapping[str, Any] | None, transfer: Mapping[str, Any]) -> dict[str, str | None]:
    config, env = _dict(info, "vllm_config"), _dict(info, "vllm_env")
    model, spec = _dict(config, "model_config"), _dict(config, "speculative_config")
    extra = _dict(transfer, "kv_connector_extra_config")
    settings: dict[str, Any] = {
        "dtype": model.get("dtype"),
        "quantization": model.get("quantization"),
        "kv_cache_layout": env.get("VLLM_KV_CACHE_LAYOUT"),
        "speculative_config.method": spec.get("method"),
        "nixl_backends": None if not transfer else sorted(extra.get("backends") or ["UCX"]),
    }
    return {name: None if value is None else str(value) for name, value in settings.items()}


def _side_channel(info: Mapping[str, Any] | None, url: str, nixl: bool) -> EngineIdentity | None:
    """NIXL's side channel as a control address, so that its reachability is checked too."""
    env = _dict(info, "vllm_env")
    host, port = env.get("VLLM_NIXL_SIDE_CHANNEL_HOST"), env.get("VLLM_NIXL_SIDE_CHANNEL_PORT")
    if not nixl or host is None or port is None:
        return None
    address = f"tcp://{printable_line(str(host))}:{printable_line(str(port))}"
    return EngineIdentity(
        engine_id=url,
        incarnation=url,
        control_addresses=[address],
        fingerprint="{}",
        vocab_size=0,
        eos_token_ids=[],
        num_speculative_tokens=0,
    )


async def _sampling_defaults(client: OpenAIClient, model: Model) -> str | None:
    if model.max_model_len is None:
        return None
    url = f"{client.url}/v1/completions/render"
    try:
        left, asked = [await client.fetch("POST", url, body) for body in render_bodies(model.id, model.max_model_len)]
        return rendered_defaults(left, asked, model.max_model_len).describe() or "none"
    except (BatonError, msgspec.MsgspecError, IndexError):
        return None


async def _json(client: OpenAIClient, path: str) -> dict[str, Any] | None:
    with contextlib.suppress(BatonError):
        return decode_answer(await client.fetch("GET", client.url + path), dict[str, Any])
    return None


def _dict(of: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    value = None if of is None else of.get(name)
    return value if isinstance(value, dict) else {}
