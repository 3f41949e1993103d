"""Compares servers: everything that must be equal on prefill and decode servers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from baton.comparison import differing_facts, rounding_difference
from baton.doctor.checkup import Finding, Server
from baton.wire import differ_in_protocol

# The cure of a difference, by the beginning of its name. The first match counts.
_CURES: tuple[tuple[str, str], ...] = (
    ("version", "run one version everywhere"),
    ("protocol", "run one version of Baton everywhere"),
    ("engine", "run one version everywhere"),
    ("served_model_name", "start both with the same --served-model-name"),
    ("max_model_len", "start both with the same --max-model-len: longer requests cannot be handed off"),
    ("seed", "start both with the same --seed, or none"),
    ("kv_transport", "start both with the same kv_transport and NIXL back-end"),
    ("nixl_backends", 'name the same "backends" in kv_connector_extra_config of both'),
    ("block_size", 'start both with the same --block-size (BatonConnector also takes "granularity": "token")'),
    ("page_size", "start both with the same --page-size"),
    ("cache", "start both with the same --kv-cache-dtype"),
    ("kv_cache_dtype", "start both with the same --kv-cache-dtype"),
    ("kv_cache_layout", "set the same VLLM_KV_CACHE_LAYOUT for both"),
    ("disaggregation_transfer_backend", "start both with the same --disaggregation-transfer-backend"),
    ("model.dtype", "start both with the same --dtype"),
    ("model.quantization", "start both with the same --quantization"),
    ("dtype", "start both with the same --dtype"),
    ("model.tokenizer", "give both the same tokenizer files"),
    ("model", "start both from the same checkpoint and revision"),
    ("output.sampling_defaults", "give both the same generation_config.json, --generation-config and overrides"),
    ("sampling_defaults", "give both the same generation_config.json, --generation-config and overrides"),
    ("output.grammars", "install the same grammar library, or start both with the same backend"),
    ("output.first_step", 'set the same "first_step" in kv_connector_extra_config of both'),
    ("output", "start both from the same checkpoint and generation config"),
    ("sampler.batch_invariant", "start both with --batch-invariant, or both without"),
    ("sampler", "run one version of Baton everywhere"),
    ("numerics", "run both on one type of CPU with the same libraries, --attention-backend and OMP_NUM_THREADS, or "
                 "without --batch-invariant"),
    ("drafter.method", 'name the same "method" in --speculative-config of both'),
    ("drafter.verifier", 'name the same "verifier" in --speculative-config of both'),
    ("drafter.num_speculative_tokens", 'name the same "num_speculative_tokens" in --speculative-config of both'),
    ("drafter.weights", 'name the same drafter "model" in --speculative-config of both'),
    ("drafter", 'start both with the same --speculative-config, or let drafters differ ("draft_kv")'),
    ("num_speculative_tokens", 'name the same "num_speculative_tokens" in --speculative-config of both'),
    ("speculative", "start both with the same speculative flags"),
    ("group", "start both from the same checkpoint, with the same drafter and attention backend: their KV has other "
              "layouts"),
)  # fmt: skip
_OTHERWISE = "start both with the same value"
_MAX_SHOWN = 120


def check_pairs(servers: Sequence[Server]) -> Iterator[Finding]:
    """Differences from the reference: the first server with whose facts most servers agree."""
    for kind in dict.fromkeys(server.kind for server in servers):
        alike = [server for server in servers if server.kind == kind and server.problem is None]
        if len(alike) < 2:
            continue
        reference = _reference(alike)
        for server in alike:
            if server is not reference:
                yield from _differences(reference, server)


def rounding_notes(servers: Sequence[Server]) -> Iterator[str]:
    known = [server for server in servers if server.identity is not None]
    for server in known[1:]:
        difference = rounding_difference(known[0].facts(), server.facts())
        if difference is not None:
            yield f"{known[0].url} and {server.url}: {difference}"


def _reference(servers: Sequence[Server]) -> Server:
    keys = [(tuple(sorted(map(repr, s.facts().items()))), tuple(sorted(s.settings.items()))) for s in servers]
    counts = Counter(keys)
    return servers[max(range(len(servers)), key=lambda i: (counts[keys[i]], -i))]


def _differences(reference: Server, server: Server) -> Iterator[Finding]:
    differing: dict[str, tuple[object, object]] = {}
    if reference.identity is not None and server.identity is not None:
        differing |= differing_facts(reference.facts(), server.facts())[0]
        if differ_in_protocol(reference.identity, server.identity):
            differing["protocol"] = reference.identity.protocol, server.identity.protocol
    both = sorted(reference.settings.keys() & server.settings.keys())
    differing |= {
        name: (reference.settings[name], server.settings[name])
        for name in both
        if reference.settings[name] != server.settings[name]
    }
    for name, (theirs, own) in differing.items():
        cure = next((cure for start, cure in _CURES if name.startswith(start)), _OTHERWISE)
        yield Finding(name, server.url, name, _to_text(own), f"{reference.url} has {_to_text(theirs)}", cure)


def _to_text(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ..."
