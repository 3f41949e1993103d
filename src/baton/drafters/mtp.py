"""Drafting with a target's own multi-token prediction modules (DeepSeek-V3, GLM-4.5), stored in its checkpoint.

After the last module, the last module runs again on its own output, as in vLLM with one module (transformers stops at
one draft per module).
"""

from __future__ import annotations

from baton.drafters.mtp_chain import MtpChain
from baton.drafters.mtp_head import MtpHead
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import RawConfig, get_bool
from baton.models.layers.linear import Build
from baton.models.loading.loader import fill
from baton.models.loading.stored import read_config

# Targets whose checkpoints store their modules this way, after the last layer.
_TYPES = ("deepseek_v3", "glm4_moe")
# A module's own tensors; all others belong to its layer.
_PARTS = ("enorm.", "hnorm.", "eh_proj.")
# Copies of the target's tensors.
_SHARED = ("embed_tokens.", "shared_head.head.")
MAX_MODULES = 16


class Mtp(MtpHead):
    """One module; `load` takes checkpoints with several too."""

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> MtpHead:
        """Build and fill the modules from the target's checkpoint directory `path`. Raises `CheckpointError` if some
        or all are missing."""
        num = _num_modules(read_config(path))
        drafter: MtpHead = cls(target, build) if num == 1 else MtpChain(target, build, num)
        num_target_layers = target.config.num_layers

        def rename(name: str) -> str | None:
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            of_layer = name.startswith("model.layers.") and layer.isdecimal()
            module = int(layer) - num_target_layers if of_layer else -1
            if not 0 <= module < num or rest.startswith(_SHARED) or rest.endswith("rotary_emb.inv_freq"):
                return None
            if rest.startswith("shared_head."):
                rest = rest.removeprefix("shared_head.")
            elif not rest.startswith(_PARTS):
                rest = f"layer.{rest}"
            return f"layers.{module}.{rest}"

        fill(drafter, path, rename)
        return drafter.eval()


def _num_modules(raw: RawConfig) -> int:
    if raw.get("model_type") not in _TYPES:
        known = ", ".join(_TYPES)
        raise CheckpointError(f"drafter: mtp is for targets of type {known}, this is {raw.get('model_type')!r}")
    # transformers reads the second name too.
    num = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 1))
    if type(num) is not int or not 1 <= num <= MAX_MODULES:
        raise CheckpointError(f"drafter: config.json: num_nextn_predict_layers is {num!r}, expected 1 to {MAX_MODULES}")
    if get_bool(raw, "mtp_hidden_states_first"):
        raise CheckpointError("drafter: config.json: mtp_hidden_states_first is not supported")
    return num
