"""Drafting with a target's own multi-token prediction modules (DeepSeek-V3 and V4, GLM-4.5, Qwen3.5, Nemotron 3),
stored in its checkpoint. The last module runs again on its own output, as in vLLM with one module.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.drafters.head import HeadDrafter
from baton.drafters.mtp_chain import MtpChain
from baton.drafters.mtp_head import MtpHead
from baton.drafters.mtp_streams import StreamMtp
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import RawConfig, get_bool, get_int
from baton.models.layers.linear import Build
from baton.models.loading.config_json import read_config, text_config
from baton.models.loading.filling import fill_module
from baton.models.loading.loader import quantized_weights
from baton.models.loading.stored import StoredTensors

# A module's own tensors in DeepSeek's checkpoints; the others belong to its layer.
_PARTS = ("enorm.", "hnorm.", "eh_proj.")
# The same tensors in Qwen's.
_QWEN_PARTS = {"pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "fc.": "eh_proj.", "norm.": "norm."}
_V4_PARTS = ("enorm.", "hnorm.", "e_proj.", "h_proj.", "hc_head.", "norm.")
# Copies of the target's.
_SHARED = ("embed_tokens.", "shared_head.head.")
MAX_MODULES = 16


class Mtp(MtpHead):
    """One module; `load` takes checkpoints with several too."""

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> HeadDrafter:
        """`path`: the target's checkpoint directory. Raises `CheckpointError` if some or all modules are missing."""
        raw = text_config(read_config(path))
        num, place = _num_modules(raw)
        drafter: HeadDrafter
        if place is _of_deepseek_v4:
            drafter = StreamMtp(target, build)
        else:
            drafter = cls(target, build) if num == 1 else MtpChain(target, build, num)
        num_layers, stored = target.config.num_layers, StoredTensors(path)

        def rename(name: str) -> str | None:
            module, own_name = place(stored.name(name), num_layers) or (num, "")
            return f"layers.{module}.{own_name}" if module < num else None

        fill_module(drafter, path, rename, target.unpack, quantized_weights(raw, stored))
        return drafter.eval()


def _after_the_last_layer(name: str, num_layers: int) -> tuple[int, str] | None:
    """DeepSeek: module j is stored as layer `num_layers` + j. Returns a tensor's module and its name there."""
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if not name.startswith("model.layers.") or not layer.isdecimal() or int(layer) < num_layers:
        return None
    if rest.startswith(_SHARED) or rest.endswith("rotary_emb.inv_freq"):
        return None
    if rest.startswith("shared_head."):
        rest = rest.removeprefix("shared_head.")
    elif not rest.startswith(_PARTS):
        rest = f"layer.{rest}"
    return int(layer) - num_layers, rest


def _of_qwen(name: str, num_layers: int) -> tuple[int, str] | None:
    """Qwen3-Next and Qwen3.5: one module under `mtp.`, its layer under `mtp.layers.0.`."""
    own, _, rest = name.partition(".")
    if own != "mtp" or rest.startswith(_SHARED):
        return None
    if rest.startswith("layers.0."):
        return 0, f"layer.{rest.removeprefix('layers.0.')}"
    for stored, part in _QWEN_PARTS.items():
        if rest.startswith(stored):
            return 0, part + rest.removeprefix(stored)
    return 0, rest  # unknown, which `fill_module` refuses by name


def _of_nemotron(name: str, num_layers: int) -> tuple[int, str] | None:
    """Nemotron-H: one module, whose blocks are `mtp.layers.0`, `mtp.layers.1` and so on."""
    block, _, rest = name.removeprefix("mtp.layers.").partition(".")
    if not name.startswith("mtp.layers.") or rest.startswith(_SHARED):
        return None
    if rest.startswith("final_layernorm."):
        return 0, rest.removeprefix("final_layer")
    return 0, rest if rest.startswith(_PARTS) else f"layer.{block}.{rest}"


def _of_deepseek_v4(name: str, num_layers: int) -> tuple[int, str] | None:
    """DeepSeek-V4: one module under `mtp.0.`."""
    rest = name.removeprefix("mtp.0.")
    if rest == name or rest.startswith(("embed.", "head.")):
        return None
    return 0, rest if rest.startswith(_V4_PARTS) else f"layer.{rest}"


# The storage of a module's tensors in checkpoints, by type of target.
_PLACES: dict[str, Callable[[str, int], tuple[int, str] | None]] = {
    "deepseek_v3": _after_the_last_layer,
    "deepseek_v32": _after_the_last_layer,
    "deepseek_v4": _of_deepseek_v4,
    "glm4_moe": _after_the_last_layer,
    "glm_moe_dsa": _after_the_last_layer,
    "nemotron_h": _of_nemotron,
    "qwen3_5_moe_text": _of_qwen,
    "qwen3_5_text": _of_qwen,
    "qwen3_next": _of_qwen,
}


def _num_modules(raw: RawConfig) -> tuple[int, Callable[[str, int], tuple[int, str] | None]]:
    """The number of modules, and the storage of their tensors. Raises `CheckpointError`."""
    place = _PLACES.get(str(raw.get("model_type")))
    if place is None:
        known = ", ".join(_PLACES)
        raise CheckpointError(f"drafter: mtp is for targets of type {known}, this is {raw.get('model_type')!r}")
    if get_bool(raw, "mtp_hidden_states_first"):
        raise CheckpointError("drafter: config.json: mtp_hidden_states_first is not supported")
    if place is _of_qwen:
        if get_int(raw, "mtp_num_hidden_layers", 1) != 1:
            num = raw["mtp_num_hidden_layers"]
            raise CheckpointError(f"drafter: config.json: mtp_num_hidden_layers is {num}, expected 1")
        if get_bool(raw, "mtp_use_dedicated_embeddings"):
            raise CheckpointError("drafter: config.json: mtp_use_dedicated_embeddings is not supported")
        return 1, place
    # transformers reads the second name too.
    num = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 1))
    most = 1 if place in (_of_nemotron, _of_deepseek_v4) else MAX_MODULES
    if type(num) is not int or not 1 <= num <= most:
        raise CheckpointError(f"drafter: config.json: num_nextn_predict_layers is {num!r}, expected 1 to {most}")
    return num, place
