"""Every engine setting and every request field has a row: the facts that other engines see, or why no output depends on
it. A setting without a row fails here.
"""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import baton
from baton.comparison import token_identity
from baton.engine.build import build_engine
from baton.engine.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from baton.engine.loading.generation_config import GENERATION_FIELDS
from baton.handoff.protocol.ticket import request_digest
from baton.kernels.cpu.gemm.int8_gemm import HAS_INT8_PRODUCTS
from baton.models.loading.checkpoint_digests import _CONFIG_NOISE
from baton.sampling_params import SamplingParams, StructuredOutputsParams
from baton.text import Tokenizer
from baton.wire import EngineInfo, GenerateRequest, VllmIdentity
from testkit.checkpoints.common import make_checkpoint, make_drafter

Facts = frozenset[str]
Row = Facts | str  # the facts, or the reason why there is none

_INVARIANT = "the bits of every row are the same with `batch_invariant`, and without it no engine promises them"
_HANDOFF = "it moves bytes of which digests and lengths are checked, and decides none"
_FAILS = "it decides whether and when a request fails, not what it is answered"
_MEMORY = "it decides how many pages there are"
_REFUSED = "a directory that has it in place of what is served is refused"
_NAME = "it names a file or a process"


def facts(*names: str) -> Facts:
    return frozenset(names)


PROBE = facts("numerics.probe")
MODEL = facts("model.type", "model.dtype", "model.weights", "model.rope", "model.tokenizer", "output.eos_token_ids")
DRAFTER_OPTIONS = facts("drafter.options")

ENGINE: dict[str, Row] = {
    "model": MODEL,
    "revision": "`located` puts the directory of that revision into `model`",
    "skip_tokenizer_init": facts("output.grammars"),
    "role": "it says which legs an engine takes; all compute the same step",
    "served_model_name": "the pool compares the name itself (`EngineInfo.model`)",
    "block_size": "attention reads the same rows in the same order from pages of any size",
    "max_model_len": "a router plans for the shortest, and an engine refuses a leg that may outgrow its own",
    "max_num_batched_tokens": _INVARIANT,
    "max_prefill_tokens_with_decodes": _INVARIANT,
    "max_decode_gap_s": _INVARIANT,
    "max_num_seqs": _INVARIANT,
    "dtype": facts("model.dtype"),
    "quantization": facts("model.quantization"),
    "device": PROBE,
    "kv_cache_memory": _MEMORY,
    "gpu_memory_utilization": _MEMORY,
    "engines_per_host": _MEMORY,
    "seed": "a router draws or fills in the seed, and the pool compares `EngineInfo.default_seed`",
    "generation_config": facts("output.sampling_defaults"),
    "override_generation_config": facts("output.sampling_defaults"),
    "enable_prefix_caching": "a hit holds the bits that the prefill would write",
    "mamba_block_size": "it says where hits may end; a hit holds the bits that the prefill would write",
    "batch_invariant": facts("sampler.batch_invariant", "numerics.probe", "numerics.processor"),
    "tensor_parallel_size": PROBE,
    "pipeline_parallel_size": "a stage hands its rows on as they are",
    "data_parallel_size": "an expert's rows do not depend on the rank that computes them",
    "data_parallel_rank": _NAME,
    "data_parallel_store": _NAME,
    "reduction_slices": PROBE,
    "attention_backend": PROBE,
    "speculative_config": facts("drafter.method"),
    "kv_transfer_config": _HANDOFF,
    "kv_events_config": "it says who is told which blocks are cached",
    "ticket_key_file": _NAME,
    "keys": _NAME,
    "engine_id": _NAME,
    "recovery": _FAILS,
    "integrity": _HANDOFF,
    "kv_stream": _HANDOFF,
    "queue_timeout_s": _FAILS,
    "token_api": "it opens a route",
    "max_queued_requests": _FAILS,
    "stall_timeout_s": _FAILS,
}
SPECULATIVE: dict[str, Row] = {
    "method": facts("drafter.method"),
    "model": facts("drafter.weights"),
    "num_speculative_tokens": facts("drafter.num_speculative_tokens"),
    "verifier": facts("drafter.verifier"),
    "revision": "`located` puts the directory of that revision into `model`",
    "draft_kv": facts("drafter.kv"),
    "prompt_lookup_min": DRAFTER_OPTIONS,
    "prompt_lookup_max": DRAFTER_OPTIONS,
    "draft_tensor_parallel_size": "it is 1",
}
TRANSFER: dict[str, Row] = {
    "kv_transport": _HANDOFF,
    "control_bind": _HANDOFF,
    "handoff_timeout_s": _FAILS,
    "prefix_store": "a stored prefix holds the bits that the prefill would write, and is found by the facts as well",
}
# For a request field, the row says what carries it to every engine that computes a part of the request.
DIGEST = facts("ticket.request_digest")
REQUEST: dict[str, Row] = {
    "request_id": _NAME,
    "prompt_token_ids": DIGEST,
    "sampling_params": DIGEST,
    "num_prompt_tokens": DIGEST,
    "handoff": "it is the ticket",
    "cache_salt": "it says which requests share pages of equal bits",
    "max_prefill_tokens": _FAILS,
    "waited_s": "it is a place in the queue",
    "priority": "it is a place in the queue",
    "ttft_slo_s": "it is a place in the queue",
    "timings": "it asks for times",
    "identity": "it is the facts' own digest",
    "adapter": "Baton's engines refuse it; for vLLM's it is in the ticket's digest",
}
INFO: dict[str, Row] = {
    "engine_id": _NAME,
    "incarnation": _NAME,
    "control_addresses": _NAME,
    "fingerprint": "it is the facts",
    "vocab_size": facts("model.weights"),
    "eos_token_ids": facts("output.eos_token_ids"),
    "num_speculative_tokens": facts("drafter.num_speculative_tokens"),
    "clock": "tickets expire by it",
    "data_parallel_rank": _NAME,
    "role": ENGINE["role"],
    "model": ENGINE["served_model_name"],
    "model_path": "the tokenizer there is the fact model.tokenizer",
    "max_model_len": ENGINE["max_model_len"],
    "kv_tokens": _MEMORY,
    "kv_events_port": _NAME,
    "kv_events_replay_port": _NAME,
    "prefix_step": "it says how much of a prompt is found again",
    "prefix_multiple": "it says how much of a prompt is handed back",
    "max_num_seqs": _INVARIANT,
    "batch_invariant": facts("sampler.batch_invariant"),
    "default_seed": ENGINE["seed"],
    "sampling_defaults": facts("output.sampling_defaults"),
    "token_api": "it opens a route",
    "adapters": "a request names one",
    "moves_prefixes": "it says whether cached KV may be asked of it",
    "kv_transport": TRANSFER["kv_transport"],
    "protocol": "engines of two versions are not paired",
    "prefill_multiple": "it says at which tokens a handoff may end",
    # Of vLLM servers.
    "truncate_prefill": "it says which prompt the router gives a prefill leg",
    "adapter": "it is in the digest of a leg's ticket",
    "prefix_extra": "it says how much of a prompt is handed back",
    "tile": "peers compare it in HELLO with the geometries",
    "roles": ENGINE["role"],
}
# Files of a checkpoint that an engine reads.
FILES: dict[str, Row] = {
    "config.json": facts("model.weights"),
    "model.safetensors": facts("model.weights"),
    "model.safetensors.index.json": "it names the files of which all bytes are in model.weights",
    "tokenizer.json": facts("model.tokenizer"),
    "additional_chat_templates/*.jinja": "it is hashed with the files of model.tokenizer",
    **dict.fromkeys(("adapter_config.json", "modules.json", "params.json", "tekken.json", "vocab.json"), _REFUSED),
    **dict.fromkeys(("quantize_config.json", "quant_config.json", "hf_quant_config.json"), _REFUSED),
    "tokenizer_config.json": facts("model.tokenizer"),
    "chat_template.jinja": facts("model.tokenizer"),
    "chat_template.json": facts("model.tokenizer"),
    "added_tokens.json": facts("model.tokenizer"),
    "special_tokens_map.json": facts("model.tokenizer"),
    "generation_config.json": facts("output.eos_token_ids", "output.sampling_defaults"),
}
GENERATION_CONFIG: dict[str, Row] = {
    "eos_token_id": facts("output.eos_token_ids"),
    **dict.fromkeys(GENERATION_FIELDS, facts("output.sampling_defaults")),
}


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (ENGINE, [field.name for field in fields(EngineConfig)]),
        (SPECULATIVE, [field.name for field in fields(SpeculativeConfig)]),
        (TRANSFER, [field.name for field in fields(KVTransferConfig)]),
        (REQUEST, GenerateRequest.__struct_fields__),
        (INFO, {*EngineInfo.__struct_fields__, *VllmIdentity.__struct_fields__}),
    ],
    ids=["engine", "speculative", "transfer", "request", "info"],
)
def test_every_setting_has_a_row(table: dict[str, Row], names: list[str]) -> None:
    assert sorted(table) == sorted(names)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target") / "m", "llama")


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> EngineConfig:
    return EngineConfig(model=str(checkpoint), batch_invariant=True, max_model_len=128, kv_cache_memory=1 << 24)


def told(config: EngineConfig) -> dict[str, str]:
    engine = build_engine(config, lambda *chunk: None)
    try:
        return dict(json.loads(engine.info.fingerprint))
    finally:
        engine.close()


def test_a_loaded_tokenizer_is_not_loaded_again(base: EngineConfig) -> None:
    tokenizer = Tokenizer.load(base.model)
    engine = build_engine(base, lambda *chunk: None, tokenizer=tokenizer)
    assert engine.tokenizer is tokenizer
    engine.close()


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


@pytest.fixture(scope="module")
def known(base: EngineConfig) -> dict[str, str]:
    return told(base)


@pytest.mark.skipif(not HAS_INT8_PRODUCTS, reason="this CPU has no AVX2")
def test_quantised_weights_are_told(base: EngineConfig) -> None:
    wide = replace(base, dtype="bfloat16")
    assert changed(told(wide), told(replace(wide, quantization="int8"))) == {"model.quantization", "numerics.probe"}


def test_a_setting_is_told_by_the_facts_of_its_row(
    base: EngineConfig, known: dict[str, str], tmp_path: Path, checkpoint: Path
) -> None:
    sampled = tmp_path / "sampled"
    sampled.mkdir()
    (sampled / "generation_config.json").write_text('{"top_k": 5}')
    draft_model = {"method": "draft_model", "model": str(checkpoint)}
    changes: dict[str, Any] = {
        "model": str(make_checkpoint(tmp_path / "other", "llama", seed=1)),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "batch_invariant": False,
        "reduction_slices": 2,
        "generation_config": str(sampled),
        "override_generation_config": {"temperature": 0.5},
        "speculative_config": SpeculativeConfig.parse(draft_model),
    }
    # Settings that need another machine, dtype or several processes, or that have one working value here.
    left_out = {"device", "quantization", "tensor_parallel_size", "attention_backend"}
    assert set(changes) == {name for name, row in ENGINE.items() if not isinstance(row, str)} - left_out
    for name, value in changes.items():
        found = changed(known, told(replace(base, **{name: value})))
        row = ENGINE[name]
        assert found & set(row), name
        if name not in ("model", "speculative_config"):
            # Another dtype also rounds differently, and its planes differ.
            assert found <= {*row, "numerics.probe", "group.target.full"}, name


def test_settings_without_a_fact_change_none(base: EngineConfig, known: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ticket.key").write_bytes(b"k" * 32)
    (tmp_path / "ticket.key").chmod(0o600)
    other = replace(
        base,
        role="decode",
        served_model_name="other",
        block_size=7,
        max_model_len=99,
        max_num_batched_tokens=64,
        max_num_seqs=3,
        kv_cache_memory=1 << 25,
        engines_per_host=2,
        seed=5,
        enable_prefix_caching=False,
        mamba_block_size=64,
        kv_transfer_config=KVTransferConfig(kv_transport="local", handoff_timeout_s=9.0),
        ticket_key_file=str(tmp_path / "ticket.key"),
        engine_id="other",
        recovery="none",
        integrity="full",
        kv_stream="off",
        queue_timeout_s=5.0,
        max_queued_requests=7,
        stall_timeout_s=7.0,
    )
    assert told(other) == known


def test_a_drafters_setting_is_told_by_the_fact_of_its_row(
    base: EngineConfig, checkpoint: Path, tmp_path: Path
) -> None:
    heads = [make_drafter(tmp_path / name, "eagle", checkpoint, seed=seed) for seed, name in enumerate("ab")]
    eagle = {"method": "eagle", "model": str(heads[0]), "num_speculative_tokens": 2}
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    changes: dict[str, tuple[dict[str, Any], Any]] = {
        "method": (ngram, "eagle"),
        "model": (eagle, str(heads[1])),
        "num_speculative_tokens": (eagle, 3),
        "verifier": (eagle, "rejection"),
        "draft_kv": (eagle, "drop"),
        "prompt_lookup_min": (ngram, 2),
        "prompt_lookup_max": (ngram, 3),
    }
    assert set(changes) == {name for name, row in SPECULATIVE.items() if not isinstance(row, str)}
    drafting: dict[str, dict[str, str]] = {}
    for name, (first, value) in changes.items():
        before = drafting.get(first["method"]) or told(replace(base, speculative_config=SpeculativeConfig.parse(first)))
        drafting[first["method"]] = before
        second = eagle if name == "method" else {**first, name: value}
        after = told(replace(base, speculative_config=SpeculativeConfig.parse(second)))
        row = SPECULATIVE[name]
        assert set(row) <= changed(before, after), name
        if name != "method":
            assert changed(before, after) == set(row), name


def test_drafters_decide_tokens_unless_the_verifier_is_coupled() -> None:
    def identity(**drafter: str) -> str:
        return token_identity(json.dumps({"model.weights": "w", **{f"drafter.{k}": v for k, v in drafter.items()}}))

    none = identity(method="none")
    assert identity(method="eagle", weights="a", verifier="coupled") == none
    assert identity(method="ngram", options="[]", verifier="coupled") == none
    rejection = identity(method="eagle", weights="a", verifier="rejection")
    assert len({none, rejection, identity(method="eagle", weights="b", verifier="rejection")}) == 3
    assert identity(method="eagle", weights="a") != none  # vLLM uses its own verifier


# ---------------------------------------------------------------- requests


def test_a_ticket_covers_the_request() -> None:
    """Two legs of one ticket cannot ask for different outputs: every parameter changes its digest."""
    other: dict[str, Any] = {
        "logit_bias": {1: 1.0},
        "allowed_token_ids": (1,),
        "bad_words": ("x",),
        "stop": ("x",),
        "stop_token_ids": (1,),
        "structured_outputs": StructuredOutputsParams(regex="x"),
        "logprobs": 1,
        "prompt_logprobs": 1,
        "seed": 1,
    }
    plain = SamplingParams()
    digest = request_digest([1, 2], plain)
    for name in SamplingParams.__struct_fields__:
        value = getattr(plain, name)
        value = other[name] if name in other else not value if isinstance(value, bool) else value + 1
        assert request_digest([1, 2], msgspec.structs.replace(plain, **{name: value})) != digest, name
    for name in StructuredOutputsParams.__struct_fields__:
        grammar: Any = {name: ("x",) if name == "choice" else True if name == "disable_any_whitespace" else "x"}
        with_one = msgspec.structs.replace(plain, structured_outputs=StructuredOutputsParams())
        with_other = msgspec.structs.replace(plain, structured_outputs=StructuredOutputsParams(**grammar))
        assert request_digest([1, 2], with_one) != request_digest([1, 2], with_other), name
    assert request_digest([1, 3], plain) != digest
    assert request_digest([1, 2], plain, 1) != digest


# ---------------------------------------------------------------- files


def sources(*rooms: str) -> Iterator[ast.AST]:
    root = Path(baton.__file__).parent
    for room in rooms:
        for path in sorted((root / room).rglob("*.py")):
            yield from ast.walk(ast.parse(path.read_text()))


def test_every_file_of_a_checkpoint_has_a_row() -> None:
    found = {
        node.value
        for node in sources("models", "drafters", "text", "structured", "engine")
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.endswith((".json", ".jinja", ".safetensors"))
        and not node.value.startswith(("*", "."))  # patterns of hub downloads, and suffixes
    }
    assert found == set(FILES)


def test_config_keys_outside_the_digest_are_read_by_nobody() -> None:
    """All other keys of config.json are in model.weights."""
    read = {node.value for node in sources("models", "drafters", "text") if isinstance(node, ast.Constant)}
    names = {node.attr for node in sources("models", "drafters", "text") if isinstance(node, ast.Attribute)}
    assert sum(name in read for name in _CONFIG_NOISE) == len(_CONFIG_NOISE)  # where they are listed
    assert not names & set(_CONFIG_NOISE)


class _Recorder(dict[str, Any]):
    read: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def test_every_key_of_generation_config_that_is_read_has_a_row(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "m")
    (copy / "generation_config.json").write_text('{"eos_token_id": [7, 9], "mark": "generation"}')
    loads, read = json.loads, set[str]()

    def recorded(text: Any, **options: Any) -> Any:
        value = loads(text, **options)
        if isinstance(value, dict) and value.get("mark") == "generation":
            value = _Recorder(value)
            value.read = read
        return value

    monkeypatch.setattr(json, "loads", recorded)
    Tokenizer.load(copy)
    found = told(EngineConfig(model=str(copy), max_model_len=64, kv_cache_memory=1 << 24))
    assert read == set(GENERATION_CONFIG)
    assert found["output.eos_token_ids"] == "[7, 9, 257]"


def test_a_changed_file_changes_the_fact_of_its_row(base: EngineConfig, known: dict[str, str], tmp_path: Path) -> None:
    def edited(name: str, **changes: Any) -> dict[str, str]:
        copy = shutil.copytree(base.model, tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}")
        path = copy / name
        value = json.loads(path.read_text()) if path.exists() else {}
        if name == "tokenizer.json":
            changes = {}  # the file is then refused; its whitespace differs
        path.write_text(json.dumps({**value, **changes}))
        return told(replace(base, model=str(copy)))

    for name in FILES:
        if FILES[name] == facts("model.tokenizer"):
            assert changed(known, edited(name, x=1)) == {"model.tokenizer"}, name
    assert changed(known, edited("generation_config.json", eos_token_id=[1, 257])) == {"output.eos_token_ids"}
    assert changed(known, edited("generation_config.json", top_p=0.5)) == {"output.sampling_defaults"}
    assert changed(known, edited("config.json", x=1)) == {"model.weights"}
    assert changed(known, edited("config.json", rms_norm_eps=1e-3)) == {"model.weights", "numerics.probe"}
