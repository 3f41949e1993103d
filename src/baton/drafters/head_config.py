"""Reads the `config.json` of a head, in the formats of all projects that publish heads.

A flag that is set and unknown is refused by name (docs/drafters.md, "Heads from other projects").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import CheckpointError
from baton.models.config import ModelConfig, RawConfig, get_bool
from baton.models.loading.config_json import read_config
from baton.models.registry import model_class

# Heads with Llama layers: some configs name the method, or no model type.
_HEAD_TYPES = ("eagle", "eagle3", None)
_LATENT_HEADS = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
# The second name is that of some heads in the `speculators` format.
LAYER_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
# Fields that change the arithmetic of EAGLE-3 heads, and that no other head may have.
EAGLE3_FIELDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state", *LAYER_IDS)
# Fields of a `speculators` config besides its layer's config.
_SPECULATORS_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_state_layer_ids",
    "dtype",
    "torch_dtype",
)
# Fields of other methods and heads, with their only supported value.
_EXPECTED: Mapping[str, object] = {
    "add_para_norm": False,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_drafting": False,
    "parallel_draft_step": 1,
    "mask_token_id": None,
    "ptd_token_id": None,
    "pard_token": None,
    "logit_scale": 1.0,
}
# Flags that are read here, or that only say how a head was trained, saved or served.
_FLAGS = frozenset(
    {
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "use_aux_hidden_state",
        "attention_bias",
        "mlp_bias",
        "bias",
        "tie_word_embeddings",
        "rope_interleave",
        "norm_topk_prob",
        "use_sliding_window",
        "use_cache",
        "return_dict",
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "torchscript",
        "is_decoder",
        "has_lm_head",
        "embed_requires_grad",
        "has_no_defaults_at_init",
        "use_torch_compile",
    }
)


def read_head(path: str) -> tuple[RawConfig, ModelConfig]:
    """The head's config as one flat object, and its layers' config. Raises `CheckpointError`."""
    raw = flat_config(read_config(path))
    inner = nested(raw)
    for section in (raw, inner):
        _refuse_flags(section)
    for name, value in inner.items():
        if value is not None and raw.get(name) not in (None, value):
            raise CheckpointError(f"drafter: config.json: {name} is {raw[name]!r}, and in eagle_config it is {value!r}")
    return raw, model_class(_layer_type(raw)).parse_config(raw)


def _layer_type(raw: RawConfig) -> object:
    """Heads with MLA are recognised by their architecture only."""
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    if isinstance(architectures, list) and any(name in _LATENT_HEADS for name in architectures):
        return "deepseek_v2" if model_type == "deepseek_v2" else "deepseek_v3"
    return "llama" if model_type in _HEAD_TYPES else model_type


def flat_config(raw: RawConfig) -> RawConfig:
    """A `speculators` config (Red Hat's format) with its fields moved to where other projects put them.

    There the layer's config is nested, and `norm_before_residual` defaults to true. Raises `CheckpointError` for
    speculators other than EAGLE-3.
    """
    if "speculators_model_type" not in raw:
        return raw
    kind, layer = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind != "eagle3":
        raise CheckpointError(f"drafter: config.json: speculators_model_type is {kind!r}, only 'eagle3' is supported")
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"drafter: config.json: transformer_layer_config is {layer!r}, expected an object")
    known = {*_SPECULATORS_KEYS, "norm_before_residual", "tie_word_embeddings", "transformer_layer_config"}
    _refuse_flags({name: value for name, value in raw.items() if name not in known})
    own = {name: raw[name] for name in _SPECULATORS_KEYS if raw.get(name) is not None}
    return {**layer, **own, "norm_before_residual": get_bool(raw, "norm_before_residual", True)}


def nested(raw: RawConfig) -> RawConfig:
    """`eagle_config`, where some projects put the method's fields."""
    config = raw.get("eagle_config") or {}
    if not isinstance(config, Mapping):
        raise CheckpointError(f"drafter: config.json: eagle_config is {config!r}, expected an object")
    return config


def eagle_flag(raw: RawConfig, name: str, default: bool = False) -> bool:
    """A flag of `eagle_config`, else of the top level."""
    inner = nested(raw)
    return get_bool(inner if inner.get(name) is not None else raw, name, default)


def _refuse_flags(section: Mapping[str, Any]) -> None:
    for name, value in section.items():
        if name in _EXPECTED:
            if value is not None and value != _EXPECTED[name]:
                raise CheckpointError(f"drafter: config.json: {name} is {value!r}, which is not supported")
        elif value is True and name not in _FLAGS:
            raise CheckpointError(f"drafter: config.json: the flag {name} is unknown, and true")
